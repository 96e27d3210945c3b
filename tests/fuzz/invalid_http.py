"""Bytes that are not HTTP requests, and unusual values of headers."""

VALUES = {
    "deep lists": b"[" * 100_000,
    "deep lists that close": b"[" * 50_000 + b"]" * 50_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a number of 100,000 digits": b"9" * 100_000,
    "a number beyond floats": b"1e400",
    "a small number beyond floats": b"-1e-400000",
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "a lone surrogate": b'"\\ud800"',
    "surrogates the wrong way round": b'"\\udc00\\ud800"',
    "bytes that are not UTF-8": b'"\xff\xfe\x80"',
    "an encoded surrogate": b'"\xed\xa0\x80"',
    "a zero byte": b'"\x00"',
    "nothing": b"",
    "half a string": b'"abc',
}

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"

INVALID_HTTP = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"X-Many: 1\r\n" * 20_000 + b"\r\n",
    POST + b"X-Zero: a\x00b\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
]
