"""A generated block of a document, between two marker lines."""


def replace_block(document: str, name: str, text: str) -> str:
    """Return the document with ``text`` between its markers.

    The markers are the lines ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: A marker is missing.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"expected the lines {begin!r} and {end!r}")
    return before + begin + text + end + after
