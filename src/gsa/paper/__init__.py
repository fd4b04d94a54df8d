"""The paper's experiments, at the scale of the machine at hand: recall, ablations, efficiency."""
