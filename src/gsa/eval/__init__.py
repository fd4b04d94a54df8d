"""Evaluation: the paper's benchmarks, perplexity and probes, for any model of ours and any that transformers loads."""
