"""The judgement of what a run recorded: is it valid, what are its figures, and how certain are they."""
