"""Proof that the kit measures what it says: the law server, whose times are known, and self-tests of the kit against it."""
