"""The measure of "never wrong without a word": many architectures under many strategies, each beside one process.

Where the parity asks how far apart the figures are on models that nbkit knows, this asks what becomes of any model: it
trains as one process does, or it is refused before its first step, and `nbkit.check` has said so.
"""

import parity  # noqa: F401  its folders are where the models and the rank processes of the tests are
