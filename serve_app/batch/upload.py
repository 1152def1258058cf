"""`UploadForm` reads an upload as its bytes come: it returns the file's bytes at once, and keeps the other, short fields. No IO."""

from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.errors import BadRequest, RequestTooLarge

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
_FRAMING_BYTES = 64 << 10
"""Most bytes that a form may have beside its file."""


class UploadForm:
    """A form that is uploaded. Call ``receive`` with each piece of the body, then ``end``. ``fields`` are the fields beside the file.

    Raises:
        BadRequest: The content type is not that of a form, or its boundary is too long.
    """

    def __init__(self, content_type: str, *, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            problem = "the content type is not multipart/form-data; send the fields file and purpose as a form"
            raise BadRequest(param="file", problem=problem)
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """None until the file begins."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._num_received = 0
        self._file: list[bytes] = []
        self._name, self._value, self._ended = "", bytearray(), False
        self._header: list[bytearray] = []
        self._headers: dict[bytes, bytes] = {}
        self._in_file = False
        callbacks: Any = {
            "on_part_begin": self._part_begins,
            "on_header_begin": lambda: self._header.__setitem__(slice(None), [bytearray(), bytearray()]),
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_ends,
            "on_end": self._form_ends,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as exc:
            raise BadRequest(param="file", problem=f"the boundary of the form cannot be used: {exc}") from exc

    def receive(self, data: bytes) -> bytes:
        """Return the file's bytes in ``data``.

        Raises:
            RequestTooLarge: The file is larger than allowed.
            BadRequest: The form is broken, or has fields that are too long or too many.
        """
        self._num_received += len(data)
        try:
            self._parser.write(data)
        except FormParserError as exc:
            raise BadRequest(param="file", problem=f"the form is broken: {exc}") from exc
        if self.num_bytes > self._max_bytes:
            raise RequestTooLarge(size_bytes=self.num_bytes, limit_bytes=self._max_bytes)
        if self._num_received - self.num_bytes > _FRAMING_BYTES:
            raise BadRequest(param="file", problem=f"the form has more than {_FRAMING_BYTES} bytes beside its file")
        came, self._file = b"".join(self._file), []
        return came

    def end(self) -> None:
        """Note the end of the body.

        Raises:
            BadRequest: The form has not ended, or has no file.
        """
        if not self._ended:
            raise BadRequest(param="file", problem="the form breaks off before its end")
        if self.file_name is None:
            raise BadRequest(param="file", problem="is missing; send it as a part with a filename")

    def _part_begins(self) -> None:
        self._headers, self._value, self._in_file = {}, bytearray(), False

    def _header_ends(self) -> None:
        self._headers[bytes(self._header[0]).lower()] = bytes(self._header[1])

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" not in options:
            return
        if self._name != "file" or self.file_name is not None:
            raise BadRequest(param=self._name[:80] or "file", problem="is a file; send one, as the field `file`")
        self.file_name, self._in_file = _printable(options[b"filename"]), True

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.num_bytes += end - start
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise BadRequest(param=self._name[:80], problem=f"has more than {MAX_FIELD_BYTES} bytes")

    def _part_ends(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
            if len(self.fields) > MAX_FIELDS:
                raise BadRequest(param=self._name[:80], problem=f"is one field too many, limit {MAX_FIELDS}")

    def _form_ends(self) -> None:
        self._ended = True


def _printable(name: bytes) -> str:
    """Return the last part of the path that a client gave as the file's name. The name is only ever shown."""
    text = name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in text if character.isprintable())[:255] or "file"
