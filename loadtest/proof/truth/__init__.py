"""The law server is an HTTP server with latencies, counts, failures and capacity that are fixed in advance and logged by itself.

The load generator is measured against this server, so the server shares no code with the generator except `loadtest.errors`.

    settings   the law file
    laws       seeded draws, queue, stalls: when each chunk of a request is due; pure
    answer     what is asked, and the bytes of the answer with the time of each write; pure
    ledger     log, totals, /metrics
    server     sockets and timers
"""
