"""The models of each stage: what each is loaded from, how it is placed, what it shares."""
