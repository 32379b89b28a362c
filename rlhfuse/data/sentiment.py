"""Sentiment of an English text by VADER (Hutto and Gilbert 2014), as a reward function: a quick test of learning.

    reward.function=rlhfuse.data.sentiment:vader    reward.signature=trl    any rows

It reads words and not sense: a policy that repeats glad words gets all of it. pip install 'rlhfuse[sentiment]'.
"""

from __future__ import annotations

from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_ANALYSER = SentimentIntensityAnalyzer()  # with its lexicon, read once in a process


def vader(completions: list, **columns: Any) -> list[float]:
    """Sentiment between -1 (bad) and 1 (glad) of each completion, a text or chat turns; the prompt does not count."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [_ANALYSER.polarity_scores(text)["compound"] for text in texts]
