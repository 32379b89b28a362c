"""What is checked of a run before any rank starts: inputs, plan, and what the reward function says of a row."""

from __future__ import annotations

from contextlib import closing

from rlhfuse.base.errors import InputError, RewardError
from rlhfuse.config.settings import RunConfig
from rlhfuse.data.reward_function import RewardCall
from rlhfuse.data.reward_workers import RewardWorkers
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.run.checkpoint.checkpoint import is_finished
from rlhfuse.run.launch import finished_line, prompts_line, sharing_line, start_line
from rlhfuse.run.preflight import RunInputs, check_inputs, device_of


def dry_run(config: RunConfig, world_size: int | None, tries_reward: bool = True) -> int:
    """Check everything and print the plan; launches nothing."""
    if is_finished(config):
        print(finished_line(config))
        return 0
    inputs = check_inputs(config, planned_world_size(config, world_size), dry=True)
    print("\n".join((start_line(inputs), prompts_line(inputs), *inputs.notes)))
    print(sharing_line(inputs.config), end="")
    if tries_reward and config.reward.function:
        print(try_reward(inputs), flush=True)
    print(inputs.plan.summary)
    return 0


def check_start(config: RunConfig, ranks: int, tries_reward: bool = True) -> bool:
    """Check what `ranks` ranks will, and print what the reward functions say of one row. Raises InputError.

    Returns whether they will use GPUs.
    """
    if not is_finished(config):
        inputs = check_inputs(config, ranks)
        if tries_reward and config.reward.function:
            print(try_reward(inputs), flush=True)
    return device_of(config.trainer) == "cuda"


def try_reward(inputs: RunInputs) -> str:
    """Call the function as a run will, on the first row; what it said, for people. Raises InputError.

    Responses are the prompt's own text, from all of it down to none: a run may draw an empty one.
    """
    config, prompt = inputs.config, (*inputs.prompts.prompts, *inputs.val_prompts.prompts)[0]
    in_one = max(2, config.rollout.samples_per_prompt) if config.reward.signature == "trl" else 1
    count = max(2, in_one)  # lists of several even where a call will have one: who returns [1.0] means something else
    tokens = [prompt.tokens[: -(-len(prompt.tokens) * i // count)] for i in range(count, 1, -1)]
    end = inputs.tokenizer.eos_token_id
    tokens.append(prompt.tokens[:1] if end is None else (end,))
    texts = [inputs.tokenizer.decode(list(one), skip_special_tokens=True) for one in tokens]
    calls = []
    for first in range(0, count, in_one):
        part = slice(first, first + in_one)
        ids = tuple(range(count)[part])
        calls.append(RewardCall(ids, prompt.row, prompt.text, tuple(texts[part]), tuple(tokens[part]), prompt.where))
    reward = config.reward
    asked = reward.function, reward.signature, reward.function_weights, config.rollout.multi_turn.function_tool_path
    try:
        with closing(RewardWorkers(asked, 1, reward.timeout_seconds)) as workers:
            workers.submit(calls)
            scores, (_, _, seconds) = workers.finish().values(), workers.take_calls()
    except RewardError as error:
        how = "tried before the start on the prompt's own text, cut shorter from sample to sample, down to none"
        raise InputError(f"{error} ({how}; --no-try-reward leaves it out)") from None
    told = f"{count} texts, from all to none: {min(scores):.4g} to {max(scores):.4g}, {seconds / count:.2g} s a call"
    return f"reward.function={', '.join(reward.function)}: tried on {prompt.where}, {told}"
