# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Split JSON bodies into stored messages, note where messages end, and format offsets, without an object for each part.

The scanner accepts only what `msgspec` accepts too. For everything else, and for what it does not decide (errors, empty
arrays, deep nesting, extreme numbers), it returns None, and the caller asks `msgspec`. So both builds accept and refuse
the same bodies, with the same errors.
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from *:
    """
    #define ONES 0x0101010101010101ULL

    #if defined(__SSE2__)
    #include <emmintrin.h>
    /* Skip bytes that a string contains as they are, 16 at a time; `bits` collects the highest bits of all bytes read. */
    static inline const unsigned char *skip_ordinary(
        const unsigned char *at, const unsigned char *end, uint64_t *bits)
    {
        const __m128i quote = _mm_set1_epi8(34), backslash = _mm_set1_epi8(92), control = _mm_set1_epi8(31);
        __m128i all = _mm_setzero_si128();
        while (end - at >= 16) {
            __m128i block = _mm_loadu_si128((const __m128i *)at);
            __m128i special = _mm_or_si128(
                _mm_or_si128(_mm_cmpeq_epi8(block, quote), _mm_cmpeq_epi8(block, backslash)),
                _mm_cmpeq_epi8(_mm_min_epu8(block, control), block));
            int found = _mm_movemask_epi8(special);
            all = _mm_or_si128(all, block);
            if (found) {
                at += __builtin_ctz(found);
                break;
            }
            at += 16;
        }
        if (_mm_movemask_epi8(all))
            *bits |= 128;
        return at;
    }
    #else
    #define skip_ordinary(at, end, bits) (at)
    #endif
    """
    const uint64_t ONES
    const unsigned char *skip_ordinary(const unsigned char*, const unsigned char*, uint64_t*) noexcept
    int __builtin_ctzll(unsigned long long) noexcept

cdef enum:
    MAX_DEPTH = 64
    MAX_NUMBER_BYTES = 200
    MAX_EXPONENT_DIGITS = 2

ctypedef const unsigned char* Bytes

cdef struct Element:
    Bytes start
    Py_ssize_t size


cdef inline bint is_space(unsigned char c) noexcept:
    return c == 32 or c == 10 or c == 13 or c == 9


cdef inline Bytes skip_space(Bytes at, Bytes end) noexcept:
    while at < end and is_space(at[0]):
        at += 1
    return at


cdef inline int hex_value(unsigned char c) noexcept:
    if 48 <= c <= 57:
        return c - 48
    c |= 32
    if 97 <= c <= 102:
        return c - 87
    return -1


cdef int hex_unit(Bytes at, Bytes end) noexcept:
    """The code unit of four hexadecimal digits; -1 if there are none."""
    cdef int unit = 0, digit, i
    if end - at < 4:
        return -1
    for i in range(4):
        digit = hex_value(at[i])
        if digit < 0:
            return -1
        unit = unit * 16 + digit
    return unit


cdef Bytes skip_escape(Bytes at, Bytes end) noexcept:
    """The byte after an escape, of which `at` is the byte after the backslash; NULL if it is not valid."""
    cdef int unit
    if at >= end:
        return NULL
    if at[0] != 117:
        if at[0] in (34, 92, 47, 98, 102, 110, 114, 116):
            return at + 1
        return NULL
    unit = hex_unit(at + 1, end)
    if unit < 0 or 0xDC00 <= unit <= 0xDFFF:
        return NULL
    at += 5
    if 0xD800 <= unit <= 0xDBFF:
        if end - at < 6 or at[0] != 92 or at[1] != 117:
            return NULL
        unit = hex_unit(at + 2, end)
        if unit < 0xDC00 or unit > 0xDFFF:
            return NULL
        at += 6
    return at


cdef inline uint64_t special_bytes(uint64_t word) noexcept:
    """A mask of the bytes of a word that are a quote, a backslash or a control character.

    The highest bit of such a byte is set. The lowest set bit is exact; those above it may be wrong.
    """
    cdef uint64_t quotes = word ^ (ONES * 34)
    cdef uint64_t backslashes = word ^ (ONES * 92)
    return (
        ((word - ONES * 32) & ~word) | ((quotes - ONES) & ~quotes) | ((backslashes - ONES) & ~backslashes)
    ) & (ONES * 128)


cdef inline Bytes skip_string(Bytes at, Bytes end, uint64_t* seen) noexcept:
    """The byte after a string, of which `at` is the first byte after the opening quote; NULL if it is not valid."""
    cdef uint64_t word, special, bits = 0
    while True:
        at = skip_ordinary(at, end, &bits)
        while end - at >= 8:
            memcpy(&word, at, 8)
            special = special_bytes(word)
            bits |= word
            if special:
                at += __builtin_ctzll(special) >> 3
                break
            at += 8
        else:
            while at < end and at[0] >= 32 and at[0] != 34 and at[0] != 92:
                bits |= at[0]
                at += 1
            if at == end:
                return NULL
        if at[0] == 34:
            seen[0] |= bits
            return at + 1
        if at[0] != 92:
            return NULL
        at = skip_escape(at + 1, end)
        if at == NULL:
            return NULL


cdef Bytes skip_digits(Bytes at, Bytes end) noexcept:
    while at < end and 48 <= at[0] <= 57:
        at += 1
    return at


cdef Bytes skip_number(Bytes at, Bytes end) noexcept:
    cdef Bytes first = at
    cdef Bytes digits
    if at[0] == 45:
        at += 1
        if at >= end:
            return NULL
    if at[0] == 48:
        at += 1
    else:
        digits = at
        at = skip_digits(at, end)
        if at == digits:
            return NULL
    if at < end and at[0] == 46:
        digits = at + 1
        at = skip_digits(digits, end)
        if at == digits:
            return NULL
    if at < end and (at[0] | 32) == 101:
        at += 1
        if at < end and (at[0] == 43 or at[0] == 45):
            at += 1
        digits = at
        at = skip_digits(at, end)
        if at == digits or at - digits > MAX_EXPONENT_DIGITS:
            return NULL
    return at if at - first <= MAX_NUMBER_BYTES else NULL


cdef Bytes skip_value(Bytes at, Bytes end, int depth, uint64_t* seen) noexcept:
    """The byte after a value that begins at `at`; NULL if it is not valid, or not decided here."""
    cdef unsigned char c
    if at >= end:
        return NULL
    c = at[0]
    if c == 34:
        return skip_string(at + 1, end, seen)
    if c == 123:
        if depth == MAX_DEPTH:
            return NULL
        at = skip_space(at + 1, end)
        if at < end and at[0] == 125:
            return at + 1
        while True:
            if at >= end or at[0] != 34:
                return NULL
            at = skip_string(at + 1, end, seen)
            if at == NULL:
                return NULL
            at = skip_space(at, end)
            if at >= end or at[0] != 58:
                return NULL
            at = skip_value(skip_space(at + 1, end), end, depth + 1, seen)
            if at == NULL:
                return NULL
            at = skip_space(at, end)
            if at >= end:
                return NULL
            if at[0] == 125:
                return at + 1
            if at[0] != 44:
                return NULL
            at = skip_space(at + 1, end)
    if c == 91:
        if depth == MAX_DEPTH:
            return NULL
        at = skip_space(at + 1, end)
        if at < end and at[0] == 93:
            return at + 1
        while True:
            at = skip_value(at, end, depth + 1, seen)
            if at == NULL:
                return NULL
            at = skip_space(at, end)
            if at >= end:
                return NULL
            if at[0] == 93:
                return at + 1
            if at[0] != 44:
                return NULL
            at = skip_space(at + 1, end)
    if c == 45 or 48 <= c <= 57:
        return skip_number(at, end)
    if c == 116 and end - at >= 4 and memcmp(at, b"true", 4) == 0:
        return at + 4
    if c == 102 and end - at >= 5 and memcmp(at, b"false", 5) == 0:
        return at + 5
    if c == 110 and end - at >= 4 and memcmp(at, b"null", 4) == 0:
        return at + 4
    return NULL


def split(bytes body):
    """The messages of a body: their stored bytes and their lengths; None if the caller has to decide.

    The body is not checked for valid UTF-8 beyond ASCII: the third value is whether all of it is ASCII.
    """
    cdef Bytes start = <Bytes>PyBytes_AS_STRING(body)
    cdef Bytes end = start + PyBytes_GET_SIZE(body)
    cdef Bytes at = skip_space(start, end)
    cdef Element element
    cdef uint64_t seen = 0
    if at < end and at[0] == 91:
        found = scan(body, at + 1 - start, end - start, end - start)
        return None if found is None else (found[0], found[1], found[3])
    element.start = at
    at = skip_value(at, end, 0, &seen)
    if at == NULL or skip_space(at, end) != end:
        return None
    element.size = at - element.start
    return join(&element, 1), (element.size + 1,), not seen & (ONES * 128)


def scan(bytes body, Py_ssize_t begin, Py_ssize_t stop, Py_ssize_t max_bytes):
    """Scan the elements of an array from the position `begin`, until `stop` is passed or the array ends.

    Returns their stored bytes, their lengths, the position after the comma that follows them (0 at the end of the
    body), and whether they are all ASCII. None if the caller has to decide, also about an element above `max_bytes`.
    """
    cdef Bytes start = <Bytes>PyBytes_AS_STRING(body)
    cdef Bytes end = start + PyBytes_GET_SIZE(body)
    cdef Bytes at = start + begin
    cdef Bytes until = start + stop
    cdef Bytes first
    cdef Py_ssize_t count = 0, room = 64
    cdef uint64_t seen = 0
    cdef Element* grown
    cdef Element* elements = <Element*>PyMem_Malloc(room * sizeof(Element))
    if elements == NULL:
        raise MemoryError
    try:
        while True:
            first = skip_space(at, end)
            # A larger element is not scanned to its end, because that would take long.
            at = skip_value(first, first + max_bytes + 1 if end - first > max_bytes else end, 1, &seen)
            if at == NULL or at - first > max_bytes:
                return None
            if count == room:
                room *= 2
                grown = <Element*>PyMem_Realloc(elements, room * sizeof(Element))
                if grown == NULL:
                    raise MemoryError
                elements = grown
            elements[count].start = first
            elements[count].size = at - first
            count += 1
            at = skip_space(at, end)
            if at >= end:
                return None
            if at[0] == 93:
                if skip_space(at + 1, end) != end:
                    return None
                at = start
                break
            if at[0] != 44:
                return None
            at += 1
            if at == end:
                return None
            if at >= until:
                break
        return join(elements, count), lengths_of(elements, count), at - start, not seen & (ONES * 128)
    finally:
        PyMem_Free(elements)


cdef bytes join(const Element* elements, Py_ssize_t count):
    """The stored form of the elements: each is followed by a comma."""
    cdef Py_ssize_t i = 0, size = count
    cdef Bytes start
    cdef char* out
    cdef bytes joined
    for i in range(count):
        size += elements[i].size
    joined = PyBytes_FromStringAndSize(NULL, size)
    out = PyBytes_AS_STRING(joined)
    i = 0
    while i < count:
        start = elements[i].start
        size = elements[i].size
        # Elements with only a comma between them are copied at once.
        while i + 1 < count and elements[i + 1].start == start + size + 1:
            i += 1
            size += 1 + elements[i].size
        memcpy(out, start, size)
        out += size
        out[0] = 44
        out += 1
        i += 1
    return joined


cdef tuple lengths_of(const Element* elements, Py_ssize_t count):
    cdef tuple lengths = PyTuple_New(count)
    cdef object length
    cdef Py_ssize_t i
    for i in range(count):
        length = elements[i].size + 1
        Py_INCREF(length)
        PyTuple_SET_ITEM(lengths, i, length)
    return lengths


def extend_ends(array.array ends, lengths, unsigned long long end):
    """Add the end of each message to an array of type "Q"; the first one begins at `end`."""
    cdef Py_ssize_t at = len(ends)
    cdef unsigned long long length
    array.resize_smart(ends, at + len(lengths))
    for length in lengths:
        end += length
        ends.data.as_ulonglongs[at] = end
        at += 1


def extend_shifted(array.array column, numbers, int64_t by):
    """Add numbers to an array of type "I" or "Q", each of them shifted by the same distance."""
    cdef Py_buffer view
    cdef Py_ssize_t i, count, at = len(column)
    cdef bint is_wide = column.itemsize == 8, from_wide, is_outside = False
    cdef uint64_t number, moved
    if not PyObject_CheckBuffer(numbers):
        column.fromlist([each + by for each in numbers])
        return
    PyObject_GetBuffer(numbers, &view, PyBUF_SIMPLE)
    try:
        from_wide = view.itemsize == 8
        count = view.len // view.itemsize
        array.resize_smart(column, at + count)
        for i in range(count):
            number = (<uint64_t*> view.buf)[i] if from_wide else (<uint32_t*> view.buf)[i]
            moved = number + <uint64_t> by
            is_outside |= moved > number if by < 0 else moved < number
            if is_wide:
                column.data.as_ulonglongs[at + i] = moved
            else:
                is_outside |= moved >> 32 != 0
                column.data.as_uints[at + i] = <uint32_t> moved
    finally:
        PyBuffer_Release(&view)
    if is_outside:
        array.resize_smart(column, at)
        raise OverflowError("a shifted number does not fit into its column")


cdef inline void put_hex(unsigned char* at, uint64_t number) noexcept:
    """Write 16 hexadecimal digits."""
    cdef int i
    cdef unsigned char digit
    for i in range(15, -1, -1):
        digit = number & 15
        at[i] = digit + (48 if digit < 10 else 87)
        number >>= 4


def offset_token(uint64_t index, uint64_t position, uint64_t incarnation):
    """The token of an offset (see `core/offsets`)."""
    token = PyBytes_FromStringAndSize(NULL, 50)
    cdef unsigned char* at = <unsigned char*> PyBytes_AS_STRING(token)
    put_hex(at, index)
    at[16] = 95
    put_hex(at + 17, position)
    at[33] = 95
    put_hex(at + 34, incarnation)
    return token
