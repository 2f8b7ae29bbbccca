"""Pictures for the documentation."""

from __future__ import annotations


def picture(size: str, title: str, style: str, body: str) -> str:
    """An SVG file; `size` is its attributes for that."""
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>{title}</title><style>{style}</style>{body}</svg>\n'
