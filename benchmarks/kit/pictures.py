"""Charts as SVG files."""

from jshard.system.pages.charts import element


def picture(size: tuple[int, int], label: str, style: str, parts: list[str]) -> str:
    """Returns an SVG file.

    Args:
      size: Width and height, in px.
      label: A description for screen readers.
      style: CSS.
      parts: SVG elements.
    """
    content = "\n".join([f"<style>{style}</style>", *parts])
    return element(
        "svg",
        f"\n{content}\n",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {size[0]} {size[1]}",
        font_family="sans-serif",
        font_size=12,
        role="img",
        aria_label=label,
    )
