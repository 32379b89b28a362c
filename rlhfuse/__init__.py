"""rlhfuse: PPO for language models with generation/inference and actor/critic training fused."""


def train(config, reward=None, ranks=None, overrides=()):
    """Train on this machine and wait for the end; returns the run's `folder` and its `metrics`, a dict an iteration.

    `config`: the path of a YAML file, or nested settings as a dict. `reward`: a function with TRL's or verl's
    signature, or its name, as `reward.function`, or a list of them. It is sent to the ranks by its name, so it must
    stand in a module or a script; a script is read again there, down to its call of this function. `ranks`: processes,
    by default as many as `parallel.actor_train` says. `overrides`: `key=value`, as rlhfuse-train takes them.

    Raises InputError (a ValueError) for what cannot be used, and RuntimeError where the run failed, with its last line.
    """
    from rlhfuse.run.python_entry import train as run

    return run(config, reward, ranks, overrides)
