"""What all tests share.

Hypothesis: the same examples in every run; `HYPOTHESIS_PROFILE=explore` draws new ones, and more of them.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("fedfq", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fedfq"))

# A shell starts what runs in its background with Ctrl-C ignored; tests of interrupts would wait for ever there.
signal.signal(signal.SIGINT, signal.default_int_handler)
