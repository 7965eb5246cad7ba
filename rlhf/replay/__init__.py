"""Any recorded step computed again, and the first difference of two runs."""
