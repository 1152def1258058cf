"""`BoundedLoader` refuses YAML whose aliases repeat too much. Other modules of this package load documents with it."""

import itertools

import yaml

from serve_app.errors import ConfigError

MAX_VALUES = 500_000
"""Most values of a document, those that aliases repeat included. A file of 5,000 tenants, each with a key and all fields, has 220,000."""
_CHARS = 100
"""A text counts as one more value for each so many characters."""
_HINT = "use fewer aliases; an alias below its own anchor repeats without end"


class BoundedLoader(yaml.SafeLoader):
    """A SafeLoader of at most `MAX_VALUES` values.

    Without the bound, 40 lines that each repeat the line before twice make 2 ** 40 values, which no validation ends on; with merge keys
    (`<<`) even the construction does not end.
    """

    def compose_document(self) -> yaml.Node:
        """Return the root of the next document.

        Raises:
            ConfigError: The document holds more values. The path is the line and column of the smallest part that does.
        """
        node = super().compose_document()
        assert node is not None  # each document has a root
        _num_values(node, {})
        return node


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values the node holds, itself included. ``known`` has the numbers of the nodes seen before, by their ids."""
    if (num := known.get(id(node))) is not None:
        return num
    if isinstance(node, yaml.ScalarNode):
        num = 1 + len(node.value) // _CHARS
    else:
        known[id(node)] = MAX_VALUES  # for aliases to this node below it, whose repetitions have no end
        below = itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        num = 1 + sum(_num_values(each, known) for each in below)
    if num > MAX_VALUES:
        at = f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"
        raise ConfigError(at, f"holds more than {MAX_VALUES:,} values, those that aliases repeat included", _HINT)
    known[id(node)] = num
    return num
