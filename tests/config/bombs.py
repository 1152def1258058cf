"""This module makes YAML whose aliases repeat more than any reader can bear."""


def bomb(line: str) -> str:
    """Return 40 anchors, each of which but the first is ``line``, with the name of the anchor before it in place of {0}."""
    return "x0: &x0 {a: 1}\n" + "".join(f"x{i}: &x{i} {line.format(f'x{i - 1}')}\n" for i in range(1, 40))
