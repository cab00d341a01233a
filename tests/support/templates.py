"""Chat templates of every kind that all render the same text."""

START = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
END = "<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}"
PIECES = "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
TEMPLATES = {
    "adds strings": START + "{{ '' + m['content'] }}" + END,
    "prints what it gets": START + "{{ m['content'] }}" + END,
    "trims": START + "{{ m['content'] | trim }}" + END,
    "drops lists": START + "{{ m['content'] if m['content'] is string else '' }}" + END,
    "strings or parts": START
    + "{% if m['content'] is string %}{{ m['content'] }}{% else %}" + PIECES + "{% endif %}" + END,
    "parts": START + PIECES + END,
    "parts of users only": START
    + "{% if m['role'] == 'user' %}" + PIECES + "{% else %}{{ '' + m['content'] }}{% endif %}"
    + END,
}  # fmt: skip


def rendered(*turns: tuple[str, str]) -> str:
    """The text that every template above makes of these turns."""
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"
