"""Ground floor: ids, types, the step door, errors, time. Imports nothing of the house; no torch."""
