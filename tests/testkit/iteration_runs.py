"""A small interpreter of iteration tables: ranks walk their lists in a random interleaving, or wait for ever."""

from itertools import product

UNITS = 4  # that every task gives: samples, two of which are a group
WHOLE = (1 << UNITS) - 1


class IterationRun:
    """A few iterations of one table without a barrier between them.

    A step is what some ranks enter together: tasks of one block and phase on the same ranks, or what a worker serves.
    Within a block no order is given between two steps of a phase: every rank takes one of its own.
    """

    def __init__(self, iteration, world_size, random):
        self.random, self.lists = random, [[] for _ in range(world_size)]  # of each rank: its steps
        self.ranks, self.serves, self.tasks = [], [], []  # by step
        self.whole, self.parts = {}, {}  # by task and iteration: tasks that it waits for, as a whole or by unit
        number = {task.name: i for i, task in enumerate(iteration.tasks)}
        last = 1 + max((take.lag for task in iteration.tasks for take in task.takes), default=0)
        for at, block, phase in product(range(last + 1), iteration.blocks, range(3)):
            tasks = [task for task in block.tasks if task.phase == phase and not (task.on_turn and at == 1)]
            steps = {}
            for task in tasks:
                key, beside = at * len(number) + number[task.name], {one.name for one in block.tasks}
                takes = [(take, (at - take.lag) * len(number) + number[take.giver]) for take in task.takes]
                streams = {take: phase == 1 and not take.lag and take.unit != "batch" for take, _ in takes}
                takes = [(take, giver, streams[take] and take.giver in beside) for take, giver in takes]
                self.whole[key] = [giver for take, giver, streamed in takes if giver >= 0 and not streamed]
                self.parts[key] = [(giver, take.unit == "group") for take, giver, streamed in takes if streamed]
                width = max(one.worker for one in tasks if one.mesh == task.mesh) or len(task.mesh)
                for i in range(0, len(task.mesh), width):
                    steps.setdefault(task.mesh[i : i + width], []).append(key)
            numbered = list(zip(range(len(self.ranks), len(self.ranks) + len(steps)), steps))
            self.ranks += steps
            self.tasks += steps.values()
            self.serves += [phase == 1] * len(steps)
            for rank, own in enumerate(self.lists):
                own += random.sample(mine := [step for step, ranks in numbered if rank in ranks], len(mine))

    def ends(self):
        """Whether all ranks come to the end of their lists, in one random interleaving."""
        self.given, self.place = dict.fromkeys(self.whole, 0), [0] * len(self.lists)
        self.there, self.entered = [0] * len(self.ranks), [False] * len(self.ranks)
        walking = [rank for rank, own in enumerate(self.lists) if own]
        for rank in walking:
            self.there[self.lists[rank][0]] += 1
        while walking:
            self.random.shuffle(walking)
            if not sum([self._go_on(rank) for rank in walking]):
                return False
            walking = [rank for rank in walking if self.place[rank] < len(self.lists[rank])]
        return True

    def _go_on(self, rank):
        """Let a rank do one piece of work, if it can."""
        step = self.lists[rank][self.place[rank]]
        ranks, tasks, given = self.ranks[step], self.tasks[step], self.given
        if not self.entered[step]:
            ready = self.serves[step] or all(given[one] == WHOLE for task in tasks for one in self.whole[task])
            if self.there[step] < len(ranks) or not ready:
                return False
            self.entered[step] = True
        if self.serves[step]:
            for task in tasks:
                if given[task] != WHOLE and (units := self._free(task)):
                    given[task] |= units if self.random.random() < 0.5 else units & -units
                    return True
            if any(given[task] != WHOLE for task in tasks):
                return False
        else:  # its own share, whatever the others do
            share = sum(1 << unit for unit in range(UNITS) if ranks[unit % len(ranks)] == rank)
            for task in tasks:
                given[task] |= share
        self.place[rank] += 1
        if self.place[rank] < len(self.lists[rank]):
            self.there[self.lists[rank][self.place[rank]]] += 1
        return True

    def _free(self, task):
        """The units that a worker can begin."""
        units = WHOLE & ~self.given[task]
        for giver in self.whole[task]:
            units *= self.given[giver] == WHOLE
        for giver, by_group in self.parts[task]:
            there = self.given[giver]
            units &= 3 * (there & there >> 1 & 0b0101) if by_group else there
        return units
