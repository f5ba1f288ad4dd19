"""What the penalties of one row start from: sparse counts, seeded when the row is built.

Does not update counts: each sampler adds a token to its own row right after the draw (architecture D6), so a retracted row that is rebuilt from
`output_ids` holds exactly the counts it had.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


def seed_counts(prompt_ids: I32, output_ids: I32) -> tuple[I32, I32]:
    """(ids seen anywhere, how often each was drawn): repetition needs the first, frequency and presence the second. O(n log n)."""
    ids, where = np.unique(np.concatenate((prompt_ids, output_ids)), return_inverse=True)
    drawn = np.bincount(where[len(prompt_ids) :], minlength=len(ids))
    return ids.astype(np.int32), drawn.astype(np.int32)
