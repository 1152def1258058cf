"""The glossary explains each term of the report in a sentence; the page shows it where a reader points at the term."""

import re

from markupsafe import Markup, escape

TERMS = {
    "TTFT": "Time to first token: from the moment a request was due until the first non-empty token of its answer was read.",
    "E2E": "End to end: from the moment a request was due until its answer was complete.",
    "ITL": "Inter-token latency: each gap between two tokens of an answer. Tokens of one chunk have a gap of 0.",
    "TPOT": "Time per output token: (time of the last token - time of the first) / (output tokens - 1), one value per request.",
    "p50": "Half of the values are at most this: the median.",
    "p90": "90 % of the values are at most this.",
    "p95": "95 % of the values are at most this.",
    "p99": "99 % of the values are at most this.",
    "n": "Number of values: of requests or, for ITL, of gaps.",
    "n_eff": "Number of independent values that they are worth. It is smaller, because latencies of a queue resemble their neighbours.",
    "95 % interval": "Of 100 intervals made this way, 95 contain the value that an endless run of the same load would show.",
    "SLO": "Service level objective: the limits that the scenario names, and the share of the requests that must keep each.",
    "goodput": "Requests per second that were answered inside every limit of the SLO. Failed requests count as not good.",
    "open loop": "Requests are sent at times that were fixed before the run, whether the target keeps up or not.",
    "closed loop": "Each client waits for its answer before it sends again. A stall of the target then hides most of itself.",
    "lag": "From the moment a request was due until the load generator sent it: the generator's own delay.",
    "read lag": "From the moment data could be read until the load generator read it: the generator's own delay.",
    "gate": "A condition for valid figures. If a gate fails, the run is invalid and no figure is shown.",
    "warm-up": "The beginning of the run. Its requests are sent and recorded, and left out of every figure.",
    "drain": "The time after the last request in which answers may still end. Unfinished requests then become timeouts.",
    "EOS": "The token by which a model ends its answer. If it is ignored, answers are as long as the scenario says.",
    "measured window": "Requests that were due in this time are in the figures.",
    "output tokens": "Tokens of the answers, as the target counts them in its usage, else as they were received.",
    "good request": "A request that was answered inside every limit of the SLO. Without an SLO, every request that was answered is good.",
    "replica-seconds": "This is the number of ready replicas, summed over the time in which it was known: what the load cost. Per good "
    "request, this sum is divided by the number of good requests that were due in that time.",
    "GPU-seconds": "These are the replica-seconds times the number of GPUs that a replica has according to the scenario.",
}
"""The terms, in the order of the glossary at the end of the page."""

_PATTERN = re.compile("|".join(rf"(?<![\w-]){re.escape(term)}(?![\w-])" for term in sorted(TERMS, key=len, reverse=True)))


def gloss(text: object) -> Markup:
    """Return the text as HTML; the first occurrence of each term shows its explanation on hover."""
    text, parts, end, seen = str(text), [Markup()], 0, set[str]()
    for match in _PATTERN.finditer(text):
        term = match[0]
        if term in seen:
            continue
        seen.add(term)
        parts += [escape(text[end : match.start()]), Markup('<abbr title="{}">{}</abbr>').format(TERMS[term], term)]
        end = match.end()
    return Markup().join([*parts, escape(text[end:])])
