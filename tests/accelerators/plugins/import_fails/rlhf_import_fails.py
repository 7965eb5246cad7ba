"""A plugin whose vendor library is missing."""

import a_library_that_nobody_has  # noqa: F401
