"""Write the records of a run in the formats of other programs, from the run's folder alone.

Each file of this package is one format, or several that receive records one by one (`replay.py`).
"""
