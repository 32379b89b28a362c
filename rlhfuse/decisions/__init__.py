"""Pure decisions that the runtime executes and the simulator prices: migration, packing, layouts, weight moves."""
