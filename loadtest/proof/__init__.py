"""The proof shows that the kit measures correctly: the law server has known times, and self-tests run the kit against it."""
