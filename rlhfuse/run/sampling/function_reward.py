"""The reward function of a run as the runtime asks for it: rollouts in, scores by sample id out.

Decodes the sampled tokens for the function; nothing is ever encoded again. A trl call has all samples of a prompt, in
the order of their copies. A call is made by the instance that began its first sample, wherever the tail moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Thread
from typing import Any

from rlhfuse.base.clock import Clock
from rlhfuse.base.sample_ids import prompt_groups, sample_id, sample_origin
from rlhfuse.base.token_spans import drawn_spans
from rlhfuse.data.call_pool import CallPool
from rlhfuse.data.prompts import Prompt
from rlhfuse.data.reward_function import RewardCall
from rlhfuse.data.reward_workers import RewardWorkers
from rlhfuse.data.tool_set import REWARD
from rlhfuse.fusion.inter.inference import Meeting
from rlhfuse.fusion.inter.iteration_store import LAST_PAUSE_SECONDS, IterationStore
from rlhfuse.gen.stop_text import text_before_stop
from rlhfuse.monitor.heartbeat import WaitingForWork
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.preflight import RunInputs
from rlhfuse.run.sampling.tool_caller import ToolCaller

AS_DRAWN = {"clean_up_tokenization_spaces": False}  # as stop texts are found: spaces before punctuation stay
# Its tokens, the runs of them that were observed, and by turn (tool, text) of each answer, where these are asked for.
Response = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[tuple[str, str]]]]


class FunctionRewarder:
    """A `Rewarder` that calls the function of the configuration, in processes of its own."""

    def __init__(
        self,
        inputs: RunInputs,
        progress: Callable[[str], None],
        caller: ToolCaller | None = None,
        clock: Clock = Clock(),
        pool: Callable[..., CallPool] = CallPool,
    ) -> None:
        """`caller`: of the samples' tools, where they have any."""
        reward = inputs.config.reward
        self._stops, decode = inputs.config.rollout.stop, inputs.tokenizer.decode
        self._decode = partial(decode, **AS_DRAWN) if self._stops else decode
        self._in_groups, self._progress = reward.signature == "trl", progress
        self._chat = inputs.tools.turns if inputs.tools and self._in_groups else None
        self._tools = caller if self._chat else None  # of whose answers the function is told
        self._caller = caller if REWARD in reward.function else None  # whose environments say the scores
        tools = inputs.config.rollout.multi_turn.function_tool_path
        asked = reward.function, reward.signature, reward.function_weights, tools
        self._workers = RewardWorkers(asked, reward.workers, reward.timeout_seconds, progress, pool)
        self._clock = clock
        self._lock = clock.Lock()  # what follows, and submitting, is the main thread's and the mail's
        self.begin((), 1)

    def begin(self, prompts: Sequence[Prompt], copies: int) -> None:
        """From now on samples are of these prompts, so many of each: of the one at its place in the draw."""
        self._prompts, self._copies = prompts, copies if self._in_groups else 1  # samples of a call
        self._groups: dict[int, dict[int, Response]] = {}  # prompt -> its finished samples that are known here
        self._homes: dict[int, int] = {}  # unfinished sample at the meeting -> the instance that calls
        self._awaited: set[int] = set()  # those that are called here
        self._met: Meeting | None = None  # before, all that ends here began here
        self._mail: Thread | None = None
        self._failure: BaseException | None = None  # of the mail

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Take finished samples; returns at once. Raises RewardError when an earlier one failed."""
        if self._failure:
            raise self._failure
        said = self._tools.said if self._tools else lambda _: ()
        self._take({one.sample_id: (one.response_tokens, one.observed, said(one.sample_id)) for one in rollouts})

    def news(self) -> dict[int, float]:
        """As `RewardWorkers.news`."""
        with self._lock:
            return self._workers.news()

    def meet(self, meeting: Meeting) -> None:
        """From now on samples go to the instance that calls the function for them; an environment's are where it is."""
        if self._caller:
            return
        here, began = meeting.instance, {sample: i for i, part in enumerate(meeting.began) for sample in part}

        def home(sample: int) -> int:
            iteration, place, _ = sample_origin(sample)
            return began[sample if self._copies == 1 else sample_id(iteration, place, 0)]

        ended = {rollout.sample_id: rollout for rollout in meeting.finished}
        come = [sample for sample in ended if began[sample] != here == home(sample)]
        gone = [sample for sample in ended if began[sample] == here != home(sample)]
        if not self._tools:  # else what tools said is known where they ended
            self.submit([ended[sample] for sample in come])
            come = gone = []
        self._met, self._homes = meeting, {sample: home(sample) for sample in (*meeting.unfinished, *come, *gone)}
        self._awaited = {sample for sample, instance in self._homes.items() if instance == here}
        self.submit([ended[sample] for sample in gone])
        if self._awaited:
            store = meeting.store.reconnect()
            self._mail = self._clock.Thread(target=self._read_mail, args=(store, here), name="reward-mail", daemon=True)
            self._mail.start()

    def finish(self) -> dict[int, float]:
        """Sample id -> what the function said of everything that was called here; waits. Raises RewardError."""
        if self._mail:
            self._progress(WaitingForWork("inference: waiting for samples that the reward function scores here"))
            self._mail.join()
        if self._failure:
            raise self._failure
        return self._workers.finish()

    def under_way(self) -> int:
        """Calls that have not ended."""
        return self._workers.under_way()

    def take_calls(self) -> tuple[int, int, float]:
        """As `RewardWorkers.take_calls`."""
        return self._workers.take_calls()

    def close(self) -> None:
        """End the processes."""
        self._workers.close()

    def _read_mail(self, store: IterationStore, here: int) -> None:
        seen = 0
        try:
            while self._awaited:
                letters = store.letters(here, seen)
                seen += len(letters)
                self._take({sample: response for sample, response in map(json.loads, letters)})
                if not letters:
                    self._clock.sleep(LAST_PAUSE_SECONDS)
        except BaseException as failure:  # raised by the main thread
            self._failure = failure

    def _take(self, samples: Mapping[int, Response]) -> None:
        """Call the function for the prompts that these samples complete; send on what is called elsewhere."""
        complete = []
        with self._lock:
            for sample, response in samples.items():
                if self._met and (home := self._homes[sample]) != self._met.instance:
                    self._met.store.send(home, json.dumps((sample, response)))
                    continue
                self._awaited.discard(sample)
                group = self._groups.setdefault(prompt_groups(sample), {}) if self._copies > 1 else {}
                group[sample] = response
                if len(group) == self._copies:
                    complete.append(self._of_prompt(group))
            self._workers.submit(complete)

    def _of_prompt(self, group: Mapping[int, Response]) -> RewardCall:
        samples = tuple(sorted(group))
        prompt = self._prompts[sample_origin(samples[0])[1]]
        tokens = tuple(tuple(group[sample][0]) for sample in samples)
        texts = tuple(text_before_stop(list(response), self._stops, self._decode) for response in tokens)
        state = self._caller.state(samples[0]) if self._caller else None
        turns = tuple(self._turns(*group[sample]) for sample in samples) if self._chat else ()
        return RewardCall(samples, prompt.row, prompt.text, texts, tokens, prompt.where, turns, state)

    def _turns(
        self, tokens: Sequence[int], observed: Sequence[Sequence[int]], said: Sequence[Sequence[tuple[str, str]]]
    ) -> Sequence[Mapping[str, Any]]:
        """Chat turns of a response: those that were drawn, and answers between them."""
        assert self._chat, "only with tools a response has several"
        spans = drawn_spans([(start, end) for start, end in observed], len(tokens))
        return self._chat.messages([tokens[start:end] for start, end in spans], said)
