# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The way of a plain append, from the received bytes to the response in memory. If there is a disk to wait for, or live
readers, to the committer, and from there to the response.

It is `Connection._answer_known`, `PlainAppends.append`, `Tail.extend` and `Connection._complete_known` for the most
frequent request: an idle connection, a known head, and a stream without special state. In every other case `append`
returns False and has changed nothing, and the caller continues in Python. So both builds have the same results.

The objects are those of the Python classes. Their slots are read and written where they are in memory, which takes a
tenth of the time of an attribute. The offset of each slot is asked from its class once, and the type of an object is
checked before its slots are used.
"""

cimport cython
from cpython cimport array
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp, memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import time
from types import MemberDescriptorType

cdef extern from "string.h":
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    """
    void* memmem(const void*, size_t, const void*, size_t) noexcept

cdef extern from *:
    """
    #include <structmember.h>
    #define SLOT_OFFSET(descriptor) (((PyMemberDescrObject *)(descriptor))->d_member->offset)
    #define IS_OBJECT(descriptor) (((PyMemberDescrObject *)(descriptor))->d_member->type == T_OBJECT_EX)
    """
    Py_ssize_t SLOT_OFFSET(object)
    bint IS_OBJECT(object)

cdef enum:
    TOKEN_BYTES = 50

_CLOCKS = ("perf_counter", "monotonic")
"""They must be the clock that is read here."""

# -- slots -------------------------------------------------------------------------------------------------------------

# The offsets of the slots that are used here, for each class. The names are in the same order in `_NAMES`.

cdef struct ConnectionSlots:
    Py_ssize_t received, writing, known, router, is_proxied, is_last
    Py_ssize_t request, request_id, repeat, operation, began_s, since_s, quick_turns, transport, serving, namespace

cdef struct InputSlots:
    Py_ssize_t reasons, parser, requests, unparsed

cdef struct KnownHeadSlots:
    Py_ssize_t head, size, generation, request, operation, repeat, owner

cdef struct RepeatSlots:
    Py_ssize_t beginning, target

cdef struct StreamSlots:
    Py_ssize_t id, type, closed, deleted, mortal, ages, followers, floor_position
    Py_ssize_t message_index, byte_position, durable_index, durable_position, accessed_ms, written_ms, in_flight

cdef struct TailSlots:
    Py_ssize_t message_index, growing, growing_position, ends, times

cdef struct QuotaSlots:
    Py_ssize_t namespaces, max_stream_bytes, max_total_bytes, watched_from, watched_to
    Py_ssize_t content_bytes, metadata_bytes, content_elsewhere, metadata_elsewhere

cdef struct MetricsSlots:
    Py_ssize_t appends, append_bytes, appended_messages, requests, request_seconds

cdef struct HistogramSlots:
    Py_ssize_t counts, total

cdef struct ContentTypeSlots:
    Py_ssize_t header, json

_NAMES = {
    "Connection": (
        "_input", "_writing", "_known", "_router", "_is_proxied", "_is_last",
        "_request", "_request_id", "_repeat", "_operation", "_began_s", "_since_s", "_quick_turns", "_transport",
        "_serving", "_namespace",
    ),
    "ConnectionInput": ("reasons", "parser", "requests", "unparsed"),
    "KnownHead": ("head", "size", "generation", "request", "operation", "repeat", "owner"),
    "Repeat": ("beginning", "target"),
    "LiveStream": (
        "id", "type", "closed", "deleted", "mortal", "ages", "followers", "floor_position",
        "message_index", "byte_position", "durable_index", "durable_position", "accessed_ms", "written_ms",
        "in_flight",
    ),
    "Tail": ("message_index", "_growing", "_growing_position", "ends", "times"),
    "Quota": (
        "namespaces", "_max_stream_bytes", "_max_total_bytes", "_watched_from", "_watched_to",
        "content_bytes", "metadata_bytes", "content_elsewhere", "metadata_elsewhere",
    ),
    "Metrics": ("appends", "append_bytes", "appended_messages", "requests", "request_seconds"),
    "Histogram": ("counts", "total"),
    "ContentType": ("header", "json"),
}


cdef Py_ssize_t offset_of(cls, str name) except -1:
    """Where the objects of a class have a slot."""
    for base in cls.__mro__:
        descriptor = base.__dict__.get(name)
        if descriptor is not None:
            if type(descriptor) is MemberDescriptorType and IS_OBJECT(descriptor):
                return SLOT_OFFSET(descriptor)
            break
    raise TypeError(f"{cls.__name__}.{name} is not a slot")


cdef int find_slots(void* slots, classes, str name) except -1:
    """Find the offsets of the slots of a class."""
    cdef Py_ssize_t* at = <Py_ssize_t*> slots
    cdef Py_ssize_t number = 0
    for slot in _NAMES[name]:
        at[number] = offset_of(classes[name], slot)
        number += 1
    return 0


cdef inline PyObject** place(object owner, Py_ssize_t offset) noexcept:
    return <PyObject**> (<char*> <PyObject*> owner + offset)


cdef inline object get(object owner, Py_ssize_t offset):
    cdef PyObject* value = place(owner, offset)[0]
    if value == NULL:
        raise AttributeError("an attribute has no value")
    return <object> value


cdef inline bint has(object owner, Py_ssize_t offset, object value) noexcept:
    """Whether a slot has exactly this object."""
    return place(owner, offset)[0] == <PyObject*> value


cdef inline void put(object owner, Py_ssize_t offset, object value) noexcept:
    cdef PyObject** at = place(owner, offset)
    cdef PyObject* before = at[0]
    Py_INCREF(value)
    at[0] = <PyObject*> value
    Py_XDECREF(before)


cdef inline int64_t get_int(object owner, Py_ssize_t offset) except? -1:
    return get(owner, offset)


cdef inline int add(object owner, Py_ssize_t offset, int64_t more) except -1:
    put(owner, offset, get_int(owner, offset) + more)
    return 0


cdef inline bint is_a(object value, object cls) noexcept:
    return <object> type(value) is cls


cdef inline double clock_s() noexcept:
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return at.tv_sec + at.tv_nsec * 1e-9


cdef inline char* put_hex(char* at, uint64_t number) noexcept:
    """Write 16 hexadecimal digits; returns where they end."""
    cdef int i
    cdef char digit
    for i in range(15, -1, -1):
        digit = number & 15
        at[i] = digit + (48 if digit < 10 else 87)
        number >>= 4
    return at + 16


cdef inline char* put_bytes(char* at, bytes part) noexcept:
    memcpy(at, PyBytes_AS_STRING(part), PyBytes_GET_SIZE(part))
    return at + PyBytes_GET_SIZE(part)


@cython.freelist(128)
cdef class Completion:
    """Sends the response to an append when it is durable: the callback of its `CommitEntry`."""

    cdef PlainAppendPath path
    cdef object connection, entry
    cdef Py_ssize_t record_size
    cdef int64_t message_index, byte_position, stream_id

    def __call__(self, result):
        self.path.complete(self, result)


cdef class PlainAppendPath:
    """The path of one server. `append` is called for received data, with its connection."""

    # The slots of the objects of a request, and their classes.
    cdef ConnectionSlots _connection
    cdef InputSlots _received
    cdef KnownHeadSlots _known
    cdef RepeatSlots _repeat
    cdef StreamSlots _stream
    cdef ContentTypeSlots _content_type
    cdef TailSlots _tail
    cdef QuotaSlots _of_quota
    cdef MetricsSlots _of_metrics
    cdef HistogramSlots _histogram
    cdef Py_ssize_t _state, _refusal, _is_current, _ends_at_s, _start_s, _stored_bytes, _streak
    cdef dict _streaks
    cdef object _connection_class, _input_class, _parser_class, _known_class, _generation_class, _repeat_class
    cdef object _stream_class, _content_type_class, _tail_class, _record_class, _entry_class, _result_class
    cdef object _histogram_class
    # The server.
    cdef object _context, _request_log, _turns, _quota, _metrics, _clock, _gate, _committer, _memory, _server_streams, _split_json
    cdef object _idle, _in_service, _no_content, _accepted
    cdef dict _by_name, _fenced, _tails
    cdef tuple _counted
    cdef bint _is_steady
    cdef Py_ssize_t _max_request_bytes, _max_body_bytes, _block_bytes, _record_overhead_bytes, _length_bytes
    cdef double _first_bound_s

    def __init__(self, classes, server):
        """`classes` by name, and the objects of the server that a request uses, by name."""
        find_slots(&self._connection, classes, "Connection")
        find_slots(&self._received, classes, "ConnectionInput")
        find_slots(&self._known, classes, "KnownHead")
        find_slots(&self._repeat, classes, "Repeat")
        find_slots(&self._stream, classes, "LiveStream")
        find_slots(&self._content_type, classes, "ContentType")
        find_slots(&self._tail, classes, "Tail")
        find_slots(&self._of_quota, classes, "Quota")
        find_slots(&self._of_metrics, classes, "Metrics")
        find_slots(&self._histogram, classes, "Histogram")
        self._state = offset_of(classes["RequestParser"], "state")
        self._refusal = offset_of(classes["RequestParser"], "refusal")
        self._is_current = offset_of(classes["HeadGeneration"], "is_current")
        self._ends_at_s = offset_of(classes["Turns"], "ends_at_s")
        self._start_s = offset_of(classes["SteadyClock"], "_start_s")
        self._stored_bytes = offset_of(classes["MemoryStorage"], "_bytes")
        self._connection_class = None
        self._input_class, self._parser_class = classes["ConnectionInput"], classes["RequestParser"]
        self._known_class, self._generation_class = classes["KnownHead"], classes["HeadGeneration"]
        self._repeat_class, self._stream_class = classes["Repeat"], classes["LiveStream"]
        self._content_type_class, self._tail_class = classes["ContentType"], classes["Tail"]
        self._record_class, self._entry_class = classes["Append"], classes["CommitEntry"]
        self._result_class, self._histogram_class = classes["Appended"], classes["Histogram"]
        self._streaks = {}
        for each in server["connection_types"]:
            if not issubclass(each, classes["Connection"]):
                raise TypeError(f"{each.__name__} is not a Connection")
            self._streaks[each] = offset_of(each, "_streak") if hasattr(each, "_streak") else -1
        self._memory = server["memory"]
        for name, kind in (("turns", "Turns"), ("quota", "Quota"), ("metrics", "Metrics"), ("memory", "MemoryStorage")):
            if type(server[name]) is not classes[kind] and (name != "memory" or self._memory is not None):
                raise TypeError(f"{name} is not a {kind}")
        self._context, self._request_log, self._turns = server["context"], server["request_log"], server["turns"]
        self._quota, self._metrics, self._clock = server["quota"], server["metrics"], server["clock"]
        self._is_steady = type(self._clock) is classes["SteadyClock"] and all(
            [time.get_clock_info(each).implementation == "clock_gettime(CLOCK_MONOTONIC)" for each in _CLOCKS]
        )
        self._gate, self._committer, self._tails = server["gate"], server["committer"], server["tails"]
        self._by_name, self._fenced = server["by_name"], server["fenced"]
        self._server_streams, self._split_json = server["server_streams"], server["split_json"]
        self._idle, self._in_service = server["idle"], server["serving"]
        self._no_content, self._accepted = server["no_content"], server["accepted"]
        self._max_request_bytes, self._max_body_bytes = server["max_request_bytes"], server["max_body_bytes"]
        self._block_bytes, self._length_bytes = server["block_bytes"], server["length_bytes"]
        self._record_overhead_bytes = server["record_overhead_bytes"]
        self._first_bound_s = server["first_bound_s"]
        self._counted = (None, None)

    # -- requests --------------------------------------------------------------------------------------------------

    def append(self, connection, bytes data):
        """Process received data of a connection; False, with nothing changed, if it is not a plain append."""
        cdef ConnectionSlots* c = &self._connection
        cdef InputSlots* i = &self._received
        cdef KnownHeadSlots* k = &self._known
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), head_bytes
        cdef double began_s
        # The connection is idle, and the client reads.
        if not is_a(connection, self._connection_class) and not self._takes(type(connection)):
            return False
        if not has(connection, c.writing, self._idle) or size > self._max_request_bytes:
            return False
        known = self._head_of(connection, data)
        if known is None:
            return False
        head_bytes = PyBytes_GET_SIZE(get(known, k.head))
        received = get(connection, c.received)
        if not is_a(received, self._input_class) or get_int(received, i.reasons):
            return False
        if len(get(received, i.requests)) or len(get(received, i.unparsed)):
            return False
        parser = get(received, i.parser)
        if not is_a(parser, self._parser_class) or not has(parser, self._state, self._idle):
            return False
        if not has(connection, c.is_proxied, False) or not has(connection, c.is_last, False):
            return False
        # The head is that of an append to a stream of this process.
        generation, repeat = get(known, k.generation), get(known, k.repeat)
        if not is_a(generation, self._generation_class) or not has(generation, self._is_current, True):
            return False
        if not is_a(repeat, self._repeat_class) or get_int(known, k.owner) >= 0 or self._request_log.is_on:
            return False
        target = get(repeat, self._repeat.target)
        if target is None:
            return False
        began_s = clock_s()
        if began_s >= <double> get(self._turns, self._ends_at_s) and not self._turns.begin(began_s):
            return False
        cdef Completion completion = self._appended(<tuple> target, data, head_bytes, began_s, False)
        if completion is None:
            return False
        operation = get(known, k.operation)
        put(connection, c.request, get(known, k.request))
        put(connection, c.request_id, "")
        put(connection, c.repeat, repeat)
        put(connection, c.operation, operation)
        put(connection, c.began_s, began_s)
        add(connection, c.quick_turns, 1)
        if self._streak >= 0:
            put(connection, self._streak, 0)
        entry = completion.entry
        if entry is None:
            put(connection, c.since_s, self._context.now_s)
            self._respond(connection, completion, operation, began_s)
        else:
            put(connection, c.writing, self._in_service)
            completion.connection, completion.entry = connection, None
            # In memory it is complete when this returns.
            self._committer.submit(entry, completion.record_size)
        return True

    def response_to(self, known, bytes data, double began_s):
        """Process a request with this head that another worker relays, and return the response; None, with nothing
        changed, if it is not a plain append that is complete at once."""
        cdef KnownHeadSlots* k = &self._known
        if self._memory is None or not is_a(known, self._known_class):
            return None
        repeat = get(known, k.repeat)
        if not is_a(repeat, self._repeat_class) or PyBytes_GET_SIZE(data) > self._max_request_bytes:
            return None
        target = get(repeat, self._repeat.target)
        if target is None:
            return None
        cdef bytes head = get(known, k.head)
        cdef Completion completion = self._appended(<tuple> target, data, PyBytes_GET_SIZE(head), began_s, True)
        if completion is None:
            return None
        response = self._response(repeat, completion)
        self._count(get(known, k.operation), clock_s() - began_s)
        return response

    cdef object _head_of(self, connection, bytes data):
        """The known head of a request, usually that of the last one; None if it is not known, or has no body."""
        cdef ConnectionSlots* c = &self._connection
        cdef KnownHeadSlots* k = &self._known
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef const char* start = PyBytes_AS_STRING(data)
        cdef const char* end
        cdef bytes head
        known = get(connection, c.known)
        if is_a(known, self._known_class) and get_int(known, k.size) == size:
            head = get(known, k.head)
            if PyBytes_GET_SIZE(head) < size and not memcmp(start, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head)):
                return known
        if size < 5 or memcmp(start, b"POST ", 5):
            return None
        end = <const char*> memmem(start, size, b"\r\n\r\n", 4)
        if end == NULL or end + 4 == start + size:
            return None
        cdef PyObject* found = PyDict_GetItem(
            get(connection, c.router).head_cache.heads, PyBytes_FromStringAndSize(start, end + 4 - start)
        )
        if found == NULL or not is_a(<object> found, self._known_class):
            return None
        known = <object> found
        if get_int(known, k.size) != size:
            return None
        put(connection, c.known, known)
        return known

    cdef bint _takes(self, cls) except -1:
        """Whether connections of this class can take this path; the last one is kept."""
        streak = self._streaks.get(cls)
        if streak is None:
            return False
        self._streak = streak
        self._connection_class = cls
        return True

    cdef int complete(self, Completion completion, result) except -1:
        """Respond to an append that is durable, or was refused by the committer."""
        cdef ConnectionSlots* c = &self._connection
        cdef InputSlots* i = &self._received
        connection = completion.connection
        if not has(connection, c.writing, self._in_service):
            return 0  # The client has disconnected.
        if result is not None or not has(connection, c.is_last, False) or not has(connection, c.namespace, None):
            if result is None:
                result = self._result_class(
                    self._accepted, completion.message_index, completion.byte_position, False, None,
                    completion.stream_id,
                )
            connection._complete_known(result)
            return 0
        try:
            self._respond(connection, completion, get(connection, c.operation), <double> get(connection, c.began_s))
            received = get(connection, c.received)
            parser = get(received, i.parser)
            if (
                has(connection, c.serving, False)
                and not len(get(received, i.requests))
                and is_a(parser, self._parser_class)
                and has(parser, self._refusal, None)
            ):
                put(connection, c.writing, self._idle)
                put(connection, c.since_s, self._context.now_s)
            else:
                connection._finish()
        except Exception as error:
            connection._fail(error)
        return 0

    cdef int _respond(self, connection, Completion completion, operation, double began_s) except -1:
        """Send the response to an append, and count the request."""
        response = self._response(get(connection, self._connection.repeat), completion)
        get(connection, self._connection.transport).write(response)
        self._count(operation, clock_s() - began_s)
        return 0

    cdef bytes _response(self, repeat, Completion completion):
        """The response to an append, with the new end of the stream."""
        cdef bytes common = self._context.common_headers.beginnings[self._no_content]
        cdef bytes beginning = get(repeat, self._repeat.beginning)
        cdef bytes response = PyBytes_FromStringAndSize(
            NULL, PyBytes_GET_SIZE(common) + PyBytes_GET_SIZE(beginning) + TOKEN_BYTES + 4
        )
        cdef char* at = put_bytes(put_bytes(PyBytes_AS_STRING(response), common), beginning)
        at = put_hex(at, completion.message_index)
        at[0] = 95
        at = put_hex(at + 1, completion.byte_position)
        at[0] = 95
        at = put_hex(at + 1, completion.stream_id)
        memcpy(at, b"\r\n\r\n", 4)
        return response

    cdef int _count(self, operation, double seconds) except -1:
        """Count a completed request, and the time that it took."""
        cdef HistogramSlots* h = &self._histogram
        cdef MetricsSlots* m = &self._of_metrics
        if self._counted[0] is not operation:
            self._counted = (operation, (operation, self._no_content))
        key = self._counted[1]
        cdef dict requests = get(self._metrics, m.requests)
        cdef PyObject* count = PyDict_GetItem(requests, key)
        cdef PyObject* histogram = PyDict_GetItem(<dict> get(self._metrics, m.request_seconds), operation)
        if (
            seconds > self._first_bound_s
            or count == NULL
            or histogram == NULL
            or not is_a(<object> histogram, self._histogram_class)
        ):
            self._metrics.count_request(operation, self._no_content, seconds)
            return 0
        requests[key] = <int64_t> <object> count + 1
        cdef list counts = get(<object> histogram, h.counts)
        counts[0] = <int64_t> counts[0] + 1
        put(<object> histogram, h.total, <double> get(<object> histogram, h.total) + seconds)
        return 0

    # -- streams ---------------------------------------------------------------------------------------------------

    cdef Completion _appended(self, tuple target, bytes data, Py_ssize_t head_bytes, double began_s, bint at_once):
        """Append the body of a request to its stream: in memory, or with an entry for the committer if there is a disk to
        wait for, or live readers, unless it must be complete `at_once`. None, with nothing changed, if that is not
        possible, the stream has special state, or a limit would be exceeded."""
        cdef StreamSlots* s = &self._stream
        cdef QuotaSlots* q = &self._of_quota
        cdef MetricsSlots* m = &self._of_metrics
        cdef PyObject* found = PyDict_GetItem(self._by_name, target[0])
        if found == NULL or not is_a(<object> found, self._stream_class):
            return None
        stream = <object> found
        kind = get(stream, s.type)
        if not is_a(kind, self._content_type_class) or target[1] != get(kind, self._content_type.header):
            return None
        if not has(stream, s.closed, False) or not has(stream, s.deleted, False) or not has(stream, s.mortal, False):
            return None
        if not has(stream, s.ages, None) or not has(self._quota, q.namespaces, None):
            return None
        stream_id = get(stream, s.id)
        if (self._fenced and stream_id in self._fenced) or target[0] in self._server_streams:
            return None
        committer = self._committer
        tail = None
        if self._memory is not None and has(stream, s.followers, None) and not committer.publishes_all:
            found = PyDict_GetItem(self._tails, stream_id)
            if found == NULL or not is_a(<object> found, self._tail_class):
                return None
            tail = <object> found
        elif at_once:
            return None
        # The messages.
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data) - head_bytes
        cdef const char* messages = PyBytes_AS_STRING(data) + head_bytes
        cdef Py_ssize_t count = 1
        cdef tuple lengths = None
        payload = None
        if size <= 0 or size > self._max_body_bytes:
            return None
        if not has(kind, self._content_type.json, False):
            try:
                payload, lengths = self._split_json(data[head_bytes:])
            except Exception:
                return None  # It is refused on the usual way.
            messages = PyBytes_AS_STRING(<bytes> payload)
            size = PyBytes_GET_SIZE(<bytes> payload)
            count = len(lengths)
        # The limits.
        cdef int64_t byte_position = get_int(stream, s.byte_position)
        cdef int64_t content = get_int(self._quota, q.content_bytes) + size
        cdef int64_t limited = get_int(self._quota, q.metadata_bytes)
        cdef int64_t limit = get_int(self._quota, q.max_stream_bytes)
        if limit and byte_position - get_int(stream, s.floor_position) + size > limit:
            return None
        limit = get_int(self._quota, q.max_total_bytes)
        if limit:
            limited += content
            if (
                limited + get_int(self._quota, q.content_elsewhere) + get_int(self._quota, q.metadata_elsewhere)
                > limit
            ):
                return None
        if not get_int(self._quota, q.watched_from) <= limited <= get_int(self._quota, q.watched_to):
            return None
        if not committer.batch_is_checked:
            try:
                self._gate.check()
            except Exception:
                return None
        # The times of a stream's messages never decrease, even if the clock is set back.
        cdef int64_t at_ms = get_int(stream, s.written_ms), now_ms
        if self._is_steady:
            now_ms = <int64_t> ((<double> get(self._clock, self._start_s) + began_s) * 1000)
        else:
            now_ms = self._clock.now_ms()
        at_ms = max(at_ms, now_ms)
        cdef Completion completion = Completion.__new__(Completion)
        completion.path = self
        completion.stream_id = stream_id
        completion.message_index = get_int(stream, s.message_index) + count
        completion.byte_position = byte_position + size
        index, position, at = completion.message_index, completion.byte_position, at_ms
        if tail is None:
            record = self._record_class(
                stream_id, at, get(stream, s.message_index), get(stream, s.byte_position),
                data[head_bytes:] if payload is None else payload, (size,) if lengths is None else lengths,
            )
            completion.entry = self._entry_class(stream, record, (), completion, None)
            completion.record_size = self._record_overhead_bytes + size + self._length_bytes * count
        elif not self._extend(tail, messages, size, lengths, count, at_ms):
            return None
        put(stream, s.message_index, index)
        put(stream, s.byte_position, position)
        put(stream, s.accessed_ms, at)
        put(stream, s.written_ms, at)
        put(self._quota, q.content_bytes, content)
        add(self._metrics, m.appends, 1)
        add(self._metrics, m.append_bytes, size)
        add(self._metrics, m.appended_messages, count)
        if tail is None:
            add(stream, s.in_flight, 1)
        else:
            put(stream, s.durable_index, index)
            put(stream, s.durable_position, position)
            add(self._memory, self._stored_bytes, size)
        return completion

    cdef bint _extend(
        self, tail, const char* messages, Py_ssize_t size, tuple lengths, Py_ssize_t count, int64_t at_ms
    ) except -1:
        """Add messages to a tail; False if its last block would be complete."""
        cdef TailSlots* t = &self._tail
        growing = get(tail, t.growing)
        cdef array.array ends = get(tail, t.ends)
        cdef array.array times = get(tail, t.times)
        cdef Py_ssize_t used = PyByteArray_GET_SIZE(growing), known = len(ends), runs = len(times), i
        cdef uint64_t end = get_int(tail, t.growing_position) + used
        cdef uint64_t end_index = get_int(tail, t.message_index) + known + count
        if used + size >= self._block_bytes:
            return False
        PyByteArray_Resize(growing, used + size)
        memcpy(PyByteArray_AS_STRING(growing) + used, messages, size)
        array.resize_smart(ends, known + count)
        if lengths is None:
            ends.data.as_ulonglongs[known] = end + size
        else:
            for i in range(count):
                end += <uint64_t> lengths[i]
                ends.data.as_ulonglongs[known + i] = end
        if runs and <uint64_t> at_ms <= times.data.as_ulonglongs[runs - 1]:
            times.data.as_ulonglongs[runs - 2] = end_index
        else:
            array.resize_smart(times, runs + 2)
            times.data.as_ulonglongs[runs] = end_index
            times.data.as_ulonglongs[runs + 1] = at_ms
        return True
