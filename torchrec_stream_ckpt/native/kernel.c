/* Gather, place and copy rows together with their CRC32C, so that each byte comes from memory once.

   A plain shared object: no header of Python, called by ctypes (kernel.py), which releases the GIL. Data goes through
   the caches in pieces of PIECE bytes: a piece is copied, and its checksum is computed while the L1 cache still has it.

   The checksum (Castagnoli, reflected, as in docs/format.md) has one function for each kind of processor. All of them
   give the same numbers, and only the fast part differs. kernel.py tests the chosen one against known values when it
   loads it. PATH_ARMV8 has never run: no such machine was at hand.

   Polynomials are reflected: bit 31 of a 32-bit number is the coefficient of x^0. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define ABI 1 /* kernel.py has the same number. Change both with any change of a function or of a struct. A function that
                 is added needs no new number: kernel.py does without it if an older library lacks it. */

#define POLYNOMIAL 0x82F63B78u
#define PIECE 8192 /* half of a small L1 cache: source and target are both in it */
#define AHEAD 12 /* rows that are requested from memory before they are copied */
#define STREAM 1024 /* bytes of each of the three streams of the checksum by crc32 instructions */

enum path { PATH_PLAIN, PATH_SSE42, PATH_AVX2, PATH_AVX512, PATH_ARMV8, PATHS };

typedef uint32_t (*update_fn)(uint32_t state, const uint8_t *data, size_t length);

static uint32_t table[8][256];
static uint32_t shift_one, shift_two; /* of a checksum, over one and two streams */

/* x^n modulo the polynomial. */
static uint32_t power(unsigned n) {
    uint32_t value = 0x80000000u;
    while (n--) value = (value >> 1) ^ (value & 1 ? POLYNOMIAL : 0);
    return value;
}

static uint64_t word(const uint8_t *data) {
    uint64_t value;
    memcpy(&value, data, 8);
    return value;
}

/* ---- plain C: eight bytes at a time by tables */

static uint32_t update_plain(uint32_t state, const uint8_t *data, size_t length) {
    for (; length >= 8; length -= 8, data += 8) {
        uint32_t low = state ^ (data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
        state = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
                table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    }
    while (length--) state = (state >> 8) ^ table[0][(state ^ *data++) & 255];
    return state;
}

#if defined(__x86_64__)

/* ---- SSE4.2: three streams of crc32 instructions, because each has to wait three cycles for the one before */

#define SSE42 __attribute__((target("sse4.2,pclmul")))

/* state * x^(8 * bytes), given multiplier = x^(8 * bytes - 33): the product and the instruction add 33. */
SSE42 static inline uint64_t shifted(uint32_t state, uint32_t multiplier) {
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)state), _mm_cvtsi32_si128((int)multiplier), 0);
    return (uint64_t)_mm_cvtsi128_si64(product);
}

SSE42 static uint32_t update_sse42(uint32_t state, const uint8_t *data, size_t length) {
    uint64_t first = state;
    for (; length >= 3 * STREAM; length -= 3 * STREAM, data += 3 * STREAM) {
        uint64_t second = 0, third = 0;
        for (size_t at = 0; at < STREAM; at += 8) {
            first = _mm_crc32_u64(first, word(data + at));
            second = _mm_crc32_u64(second, word(data + at + STREAM));
            third = _mm_crc32_u64(third, word(data + at + 2 * STREAM));
        }
        first = _mm_crc32_u64(0, shifted((uint32_t)first, shift_two) ^ shifted((uint32_t)second, shift_one)) ^ third;
    }
    for (; length >= 8; length -= 8, data += 8) first = _mm_crc32_u64(first, word(data));
    while (length--) first = _mm_crc32_u8((uint32_t)first, *data++);
    return (uint32_t)first;
}

/* ---- AVX2 and AVX-512: carry-less products. Four registers are folded over the next four registers of data.

   A register is a row of 128-bit lanes, each a polynomial low * x^64 + high. To move it on by n bits, its halves are
   multiplied by x^(n+64) and x^n. The product of reflected numbers is one bit too low, and a multiplier in the lower
   half of its 64 bits is one of 32 bits more. So the multipliers are x^(n+31) and x^(n-33). */

static uint64_t fold_by[9][2]; /* by the distance in units of 32 bytes: multipliers of the low and the high half */

#define AVX2 __attribute__((target("avx2,sse4.2,pclmul,vpclmulqdq")))
#define AVX512 __attribute__((target("avx512f,avx2,sse4.2,pclmul,vpclmulqdq")))

AVX2 static inline __m256i multipliers2(int units) {
    return _mm256_broadcastsi128_si256(_mm_set_epi64x((long long)fold_by[units][1], (long long)fold_by[units][0]));
}

AVX2 static inline __m256i fold2(__m256i held, __m256i by, __m256i data) {
    __m256i low = _mm256_clmulepi64_epi128(held, by, 0x00), high = _mm256_clmulepi64_epi128(held, by, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), data);
}

AVX2 static uint32_t update_avx2(uint32_t state, const uint8_t *data, size_t length) {
    if (length < 256) return update_sse42(state, data, length);
    const __m256i *next = (const __m256i *)data, by = multipliers2(4);
    __m256i a = _mm256_loadu_si256(next), b = _mm256_loadu_si256(next + 1);
    __m256i c = _mm256_loadu_si256(next + 2), d = _mm256_loadu_si256(next + 3);
    a = _mm256_xor_si256(a, _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)state)));
    for (length -= 128, next += 4; length >= 128; length -= 128, next += 4) {
        a = fold2(a, by, _mm256_loadu_si256(next));
        b = fold2(b, by, _mm256_loadu_si256(next + 1));
        c = fold2(c, by, _mm256_loadu_si256(next + 2));
        d = fold2(d, by, _mm256_loadu_si256(next + 3));
    }
    uint8_t rest[32];
    d = fold2(a, multipliers2(3), fold2(b, multipliers2(2), fold2(c, multipliers2(1), d)));
    _mm256_storeu_si256((__m256i *)rest, d);
    return update_sse42(update_sse42(0, rest, sizeof rest), (const uint8_t *)next, length);
}

AVX512 static inline __m512i multipliers5(int units) {
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold_by[units][1], (long long)fold_by[units][0]));
}

AVX512 static inline __m512i fold5(__m512i held, __m512i by, __m512i data) {
    __m512i low = _mm512_clmulepi64_epi128(held, by, 0x00), high = _mm512_clmulepi64_epi128(held, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, data, 0x96); /* exclusive or of all three */
}

AVX512 static uint32_t update_avx512(uint32_t state, const uint8_t *data, size_t length) {
    if (length < 512) return update_sse42(state, data, length);
    const uint8_t *next = data;
    __m512i by = multipliers5(8), a = _mm512_loadu_si512(next), b = _mm512_loadu_si512(next + 64);
    __m512i c = _mm512_loadu_si512(next + 128), d = _mm512_loadu_si512(next + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (length -= 256, next += 256; length >= 256; length -= 256, next += 256) {
        a = fold5(a, by, _mm512_loadu_si512(next));
        b = fold5(b, by, _mm512_loadu_si512(next + 64));
        c = fold5(c, by, _mm512_loadu_si512(next + 128));
        d = fold5(d, by, _mm512_loadu_si512(next + 192));
    }
    uint8_t rest[64];
    d = fold5(a, multipliers5(6), fold5(b, multipliers5(4), fold5(c, multipliers5(2), d)));
    _mm512_storeu_si512(rest, d);
    return update_sse42(update_sse42(0, rest, sizeof rest), next, length);
}

#elif defined(__aarch64__)

/* ---- ARMv8 (never run): crc32c instructions, one stream */

__attribute__((target("+crc"))) static uint32_t update_armv8(uint32_t state, const uint8_t *data, size_t length) {
    for (; length >= 8; length -= 8, data += 8) state = __crc32cd(state, word(data));
    while (length--) state = __crc32cb(state, *data++);
    return state;
}

#endif

/* ---- digests of rows, for proofs: keys[i] * (sum over j of values[i][j] * columns[j]), modulo 2^64. Values are signed. */

#define DIGEST(NAME, TYPE, HOW)                                                                                        \
    HOW static void NAME(const TYPE *first, const int64_t *index, size_t rows, size_t words, const uint64_t *columns,  \
                         const uint64_t *keys, uint64_t *found) {                                                      \
        for (size_t row = 0; row < rows; row++) {                                                                      \
            const TYPE *values = first + (index ? (size_t)index[row] : row) * words;                                   \
            uint64_t sum = 0;                                                                                          \
            for (size_t at = 0; at < words; at++) sum += (uint64_t)(int64_t)values[at] * columns[at];                  \
            found[row] = sum * keys[row];                                                                              \
        }                                                                                                              \
    }
#define DIGESTS(HOW_NAMED, HOW)                                                                                        \
    DIGEST(digest_1_##HOW_NAMED, int8_t, HOW)                                                                          \
    DIGEST(digest_2_##HOW_NAMED, int16_t, HOW)                                                                         \
    DIGEST(digest_4_##HOW_NAMED, int32_t, HOW)

DIGESTS(plain, )
#if defined(__x86_64__)
DIGESTS(avx2, __attribute__((target("avx2"))))
DIGESTS(avx512, __attribute__((target("avx512f,avx512dq,avx512vl,avx2"))))
#endif

static int digest_path = PATH_PLAIN;

#define BY_PATH(PATH)                                                                                                  \
    switch (width) {                                                                                                   \
    case 1: digest_1_##PATH(values, index, rows, words, columns, keys, found); return 0;                                      \
    case 2: digest_2_##PATH(values, index, rows, words, columns, keys, found); return 0;                                      \
    case 4: digest_4_##PATH(values, index, rows, words, columns, keys, found); return 0;                                      \
    default: return -1;                                                                                                \
    }

/* Digest rows of words of a width of 1, 2 or 4 bytes. Rows lie one after the other. index: which of them; NULL for the
   first ones. Returns -1 for another width. */
int stream_ckpt_digest_rows(const void *values, int width, const int64_t *index, size_t rows, size_t words,
                            const uint64_t *columns, const uint64_t *keys, uint64_t *found) {
#if defined(__x86_64__)
    if (digest_path == PATH_AVX512) BY_PATH(avx512)
    if (digest_path == PATH_AVX2) BY_PATH(avx2)
#endif
    BY_PATH(plain)
}

/* ---- the choice */

static update_fn update = update_plain;

static update_fn function_of(int path) {
    switch (path) {
    case PATH_PLAIN: return update_plain;
#if defined(__x86_64__)
    case PATH_SSE42:
        return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") ? update_sse42 : NULL;
    case PATH_AVX2:
        return function_of(PATH_SSE42) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq")
                   ? update_avx2 : NULL;
    case PATH_AVX512:
        return function_of(PATH_AVX2) && __builtin_cpu_supports("avx512f") ? update_avx512 : NULL;
#elif defined(__aarch64__)
    case PATH_ARMV8: return getauxval(AT_HWCAP) & (1 << 7) ? update_armv8 : NULL; /* HWCAP_CRC32 */
#endif
    default: return NULL;
    }
}

__attribute__((constructor)) static void prepare(void) {
    for (int byte = 0; byte < 256; byte++) {
        uint32_t value = (uint32_t)byte;
        for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ (value & 1 ? POLYNOMIAL : 0);
        table[0][byte] = value;
    }
    for (int more = 1; more < 8; more++)
        for (int byte = 0; byte < 256; byte++)
            table[more][byte] = (table[more - 1][byte] >> 8) ^ table[0][table[more - 1][byte] & 255];
    shift_one = power(8 * STREAM - 33);
    shift_two = power(16 * STREAM - 33);
#if defined(__x86_64__)
    for (unsigned units = 1; units <= 8; units++) {
        fold_by[units][0] = power(256 * units + 31);
        fold_by[units][1] = power(256 * units - 33);
    }
#endif
}

/* The version of everything below. */
int stream_ckpt_abi(void) { return ABI; }

/* Compute checksums by this path from now on. Returns 0, or -1 if the processor cannot. */
int stream_ckpt_use(int path) {
    update_fn found = function_of(path);
    if (found == NULL) return -1;
    update = found;
    digest_path = path;
#if defined(__x86_64__)
    if (path == PATH_AVX512 && !(__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
        digest_path = PATH_AVX2;
#endif
    return 0;
}

/* CRC32C of data, going on from that of the bytes before it (0 at the beginning). */
uint32_t stream_ckpt_crc(uint32_t crc, const uint8_t *data, size_t length) { return ~update(~crc, data, length); }

/* ---- rows */

struct column { /* weights, or one state: rows of a live tensor and the same rows packed in a frame */
    uint8_t *live;   /* the first row of the tensor */
    int64_t stride;  /* bytes from one row of the tensor to the next */
    uint8_t *packed; /* the first row in the frame */
    int64_t pitch;   /* bytes from one row in the frame to the next */
    size_t width;    /* bytes to copy of each row */
};

/* A constant width becomes a few instructions. Others are a call of memcpy. */
#define BY_WIDTH(width, DO)                                                                                            \
    switch (width) {                                                                                                   \
    case 4: DO(4) break;                                                                                               \
    case 32: DO(32) break;                                                                                             \
    case 64: DO(64) break;                                                                                             \
    case 128: DO(128) break;                                                                                           \
    case 256: DO(256) break;                                                                                           \
    case 512: DO(512) break;                                                                                           \
    default: DO(width)                                                                                                 \
    }

static inline void request(const uint8_t *row, size_t width) {
    for (size_t at = 0; at < width && at < 1024; at += 64) __builtin_prefetch(row + at);
    __builtin_prefetch(row + width - 1);
}

/* Pack rows [begin, end) of all the count rows. */
static void pack(const struct column *column, const int64_t *rows, size_t begin, size_t end, size_t count) {
    const uint8_t *live = column->live;
    const int64_t stride = column->stride;
    uint8_t *packed = column->packed + (int64_t)begin * column->pitch;
#define PACK(WIDTH)                                                                                                    \
    for (size_t row = begin; row < end; row++, packed += column->pitch) {                                              \
        if (row + AHEAD < count) request(live + rows[row + AHEAD] * stride, (WIDTH));                                  \
        memcpy(packed, live + rows[row] * stride, (WIDTH));                                                            \
    }
    BY_WIDTH(column->width, PACK)
}

/* Fill the payload of a frame: ids, then the rows of each column. Bytes between sections stay as they are.

   payload: length bytes. rows: local rows of the tensors. ids: rows + row0. columns: in the order of their sections in
   the payload, which hold nothing but these rows (pitch is width).
   Returns the checksum of the payload; -1, and the tensors were not read, if a row is not in [0, limit). */
int64_t stream_ckpt_gather(uint8_t *payload, size_t length, const int64_t *rows, size_t count, int64_t row0,
                           int64_t limit, const struct column *columns, size_t num_columns) {
    uint64_t bad = 0;
    for (size_t row = 0; row < count; row++) {
        int64_t id = rows[row] + row0;
        bad |= (uint64_t)rows[row] >= (uint64_t)limit;
        memcpy(payload + 8 * row, &id, 8);
    }
    if (bad) return -1;
    uint32_t state = ~0u;
    const uint8_t *summed = payload; /* the checksum has all bytes before this one */
    for (const struct column *column = columns; column < columns + num_columns; column++) {
        size_t most = column->width < PIECE ? PIECE / column->width : 1;
        for (size_t begin = 0; begin < count; begin += most) {
            size_t end = count - begin > most ? begin + most : count;
            pack(column, rows, begin, end, count);
            const uint8_t *until = column->packed + end * column->width;
            state = update(state, summed, (size_t)(until - summed));
            summed = until;
        }
    }
    return (uint32_t)~update(state, summed, (size_t)(payload + length - summed));
}

/* Copy width bytes, which nobody reads soon: on x86-64 past the caches, so that the old bytes are not read first. There
   the target is at a multiple of 16, and so is the width. */
static inline void copy_out(uint8_t *target, const uint8_t *data, size_t width) {
#if defined(__x86_64__)
    for (size_t at = 0; at < width; at += 16)
        _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(data + at)));
#else
    memcpy(target, data, width);
#endif
}

/* Write the rows of a frame, or of a chunk, whose ids are in [row0, row0 + rows).

   The tensors begin with the row of id first, and hold all ids of that range. arrived: flags by row of the tensors, set
   for each written row. sent: NULL, or by block of 2^block_bits ids, from first_block on; raised to place.
   Returns the number of written rows. */
int64_t stream_ckpt_place(const uint8_t *ids, size_t count, int64_t row0, int64_t rows, int64_t first,
                          const struct column *columns, size_t num_columns, uint8_t *const *arrived,
                          size_t num_arrived, int32_t *sent, int block_bits, int64_t first_block, int32_t place) {
    int64_t written = 0;
    for (const struct column *column = columns; column < columns + num_columns; column++) {
        const uint8_t *packed = column->packed;
        uint8_t *const live = column->live;
        const int64_t stride = column->stride;
#define PLACE(COPY, WIDTH)                                                                                             \
    for (size_t row = 0; row < count; row++, packed += column->pitch) {                                                \
        uint64_t id = word(ids + 8 * row);                                                                             \
        if (id - (uint64_t)row0 < (uint64_t)rows) COPY(live + ((int64_t)id - first) * stride, packed, (WIDTH));        \
    }
#define PLACE_OUT(WIDTH) PLACE(copy_out, WIDTH)
#define PLACE_IN(WIDTH) PLACE(memcpy, WIDTH)
        if (column->width % 64 == 0 && (((uintptr_t)live | (uint64_t)stride) & 63) == 0) {
            BY_WIDTH(column->width, PLACE_OUT)
        } else {
            BY_WIDTH(column->width, PLACE_IN)
        }
    }
    for (size_t row = 0; row < count; row++) {
        uint64_t number = word(ids + 8 * row);
        if (number - (uint64_t)row0 >= (uint64_t)rows) continue;
        int64_t id = (int64_t)number;
        for (size_t flags = 0; flags < num_arrived; flags++) arrived[flags][id - first] = 1;
        if (sent != NULL) {
            int32_t *newest = sent + ((id >> block_bits) - first_block);
            if (*newest < place) *newest = place;
        }
        written++;
    }
#if defined(__x86_64__)
    _mm_sfence(); /* before another thread reads what copy_out has written */
#endif
    return written;
}

#if defined(__x86_64__)
/* copy_out for a target and a width that are multiples of 64: 12% faster than by 16 bytes, on a Xeon. */
__attribute__((target("avx512f"))) static void copy_out_avx512(uint8_t *target, const uint8_t *data, size_t width) {
    for (size_t at = 0; at < width; at += 64) _mm512_stream_si512((void *)(target + at), _mm512_loadu_si512(data + at));
}
#endif

/* Copy memory that does not overlap, and that nobody reads soon. */
void stream_ckpt_copy(uint8_t *target, const uint8_t *data, size_t length) {
    size_t head = -(uintptr_t)target & 63;
    if (head > length) head = length;
    size_t whole = (length - head) & ~(size_t)63;
    memcpy(target, data, head);
#if defined(__x86_64__)
    if (update == update_avx512)
        copy_out_avx512(target + head, data + head, whole);
    else
        copy_out(target + head, data + head, whole);
    _mm_sfence();
#else
    memcpy(target + head, data + head, whole);
#endif
    memcpy(target + head + whole, data + head + whole, length - head - whole);
}
