"""Exact match on grade-school mathematics (GSM8K, Cobbe et al. 2021), as a reward function.

    reward.function=rlhfuse.data.gsm8k:exact_match    reward.signature=verl    rows with reward_model.ground_truth
    reward.function=rlhfuse.data.gsm8k:answer_match   reward.signature=trl     rows {question, answer} as published

The answer of a text is the number after its last `####`, else the last number in it.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def final_answer(text: str) -> Decimal | None:
    """The number that `text` ends on, or None."""
    numbers = _MARKED.findall(text) or _ANY.findall(text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 when the solution's answer is the number in `ground_truth`, else 0."""
    answer = final_answer(solution_str)
    return float(answer is not None and answer == final_answer(str(ground_truth)))


def answer_match(completions: list, answer: list[str]) -> list[float]:
    """The same for rows whose column `answer` is a worked solution; completions are texts or chat turns."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [exact_match("gsm8k", text, truth) for text, truth in zip(texts, answer)]
