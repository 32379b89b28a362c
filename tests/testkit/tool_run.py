"""A tiny run whose samples call tools: word-level turns of a random actor, some of which call."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from testkit.tiny import write_checkpoint, write_tokenizer

WORDS = 13
TEMPLATE = """
{%- for turn in messages %}
    {%- if turn.role == "assistant" %}
        {{- "w1 " + turn.content }}
        {%- for call in turn.tool_calls or [] %}
            {{- "w4 " + call.function.name + call.function.arguments | tojson + " " }}
        {%- endfor %}
        {{- "</s>" }}
    {%- else %}
        {{- (" w2 " if turn.role == "tool" else "w3 ") + turn.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- " w1" }}
{%- endif %}"""
RESPONSE = {  # one of these words and the one behind it are a call
    "defaults": {"role": "assistant"},
    "start_anchor": "w1",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\bw(?:4|5|6|7|8|9) ",
            "close_pattern": r" |$",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "count", "arguments": {"word": "{content}"}}},
        },
        "content": {"content": "text"},
    },
}
TOOLS = '''
import os, random, time
from pathlib import Path

made = Path(__file__).with_name("made")

def count(word: str, call: dict) -> str:
    """
    Says some words.

    Args:
        word: one of them
        call: whose call it is
    """
    with open(made, "a") as file:
        file.write(f"{call['sample_id']} {call['number']}\\n")
    time.sleep(random.random() * 0.02)  # another time at every call
    choice = random.Random(call["seed"])
    if word == "w10":
        raise ValueError("w12")
    return " ".join(f"w{choice.randrange(10, 13)}" for _ in range(choice.randrange(1, 9)))
'''
WORLD = '''
import random, time

class World:
    def reset(self, wanted):
        self.words = [f"w{wanted}"]

    def count(self, word: str, call: dict) -> str:
        """
        Remembers a word, and says all.

        Args:
            word: the word
            call: whose call it is
        """
        time.sleep(random.random() * 0.02)
        self.words.append(word if word.startswith("w") else "w11")
        return " ".join(self.words[-6:])

    def get_reward(self):
        return float(len(self.words))
'''
REWARDS = """
import itertools

def turns(completions, completion_ids, wanted):
    scores = []
    for messages, ids in zip(completions, completion_ids):
        assert messages[-1]["role"] == "assistant", messages
        for i, message in enumerate(messages):
            answers = list(itertools.takewhile(lambda m: m["role"] == "tool", messages[i + 1 :]))
            called = message.get("tool_calls", ())[:2]
            if message["role"] == "assistant" and i + 1 < len(messages):
                assert [m["name"] for m in answers] == [c["function"]["name"] for c in called], messages
            for m in answers:
                assert m.keys() == {"role", "name", "content"} and m["content"][:1] in "wE", m
        scores.append(sum(len(str(m["content"])) for m in messages) + len(set(ids)) / 64)
    return scores

def text(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str.split())) * float(ground_truth)
"""


def write_tool_run(folder: Path, **more: object) -> Path:
    """A config file; `more`: of rollout.multi_turn."""
    actor = write_checkpoint(folder / "actor", seed=1, vocab_size=WORDS + 3)
    write_tokenizer(actor, WORDS, chat_template=TEMPLATE, response_template=RESPONSE)
    for name, text in (("tools", TOOLS), ("world", WORLD), ("rewards", REWARDS)):
        (folder / f"{name}.py").write_text(text)
    truth = {"data_source": "x", "reward_model": {"ground_truth": 0.5}}
    for name, count in (("prompts", 6), ("held_out", 4)):
        rows = [
            {"prompt": [{"role": "user", "content": f"w{i + 3} w{i + 4}"}], "wanted": 4 + i, **truth}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = {
        "enable": True,
        "function_tool_path": str(folder / "tools.py"),
        "max_tool_response_length": 6,
        "workers": 1,
    }
    tools["max_parallel_calls"] = 2
    config = {
        "actor": {"path": str(actor), "optim": {"lr": 1e-3}},
        "reference": {"path": "none"},
        "reward": {"function": f"{folder}/rewards.py:turns"},
        "data": {"train_files": [str(folder / "prompts.jsonl")], "max_prompt_tokens": 16},
        "rollout": {
            "prompts_per_iteration": 4,
            "samples_per_prompt": 2,
            "max_response_tokens": 60,
            "multi_turn": tools | more,
        },
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "fusion": {"actor_microbatches": 2, "search_seconds": 0.2},
        "parallel": {"actor_train": "d1t1p2", "generation": "d2t1p1"},
        "trainer": {"iterations": 2, "tensorboard": False, "output_dir": str(folder / "run"), "watchdog_seconds": 590},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
