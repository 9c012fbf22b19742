"""Numbers that the rules of the diagnosis and the words of the report both go by: each is here once."""

# Fitted by benchmarks/calibration.py on runs of known regime; docs/calibration.md has the verdict on others.
LAZY_FEATURES, RICH_FEATURES = 0.14, 0.33  # of 1 - CKA(features at the start, features now)
LAZY_KERNEL, RICH_KERNEL = 0.33, 2.6  # of the largest |K - K₀| / |K₀|, where every layer trains
# Conventions.
ENOUGH_READINGS, ENOUGH_STEPS = 3, 10  # before a course or a regime is told
BLOWN = 100.0  # times the loss at the start: no learning ends there
QUIET_SHARE = 0.02  # of the loss decrease: a layer with less takes next to no part in it
