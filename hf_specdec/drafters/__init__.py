"""One file per way to propose tokens, all behind `engine.state.Drafter`."""
