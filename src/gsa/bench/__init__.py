"""Speed and memory, as ratios measured in one run: machines differ, and so does one machine from minute to minute."""
