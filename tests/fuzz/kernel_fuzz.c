/* Random calls of the native kernel, compared with the plainest code. Compiled with sanitizers, together with kernel.c:

       cc -g -O1 -fsanitize=address,undefined -o fuzz kernel_fuzz.c && ./fuzz SEED CALLS

   Each piece of memory is allocated at exactly its size, so that reading or writing one byte more ends the program. */

#include "../../torchrec_stream_ckpt/native/kernel.c"
#include <stdio.h>
#include <stdlib.h>

static uint64_t seed;

static uint64_t draw(uint64_t below) { /* xorshift */
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % below;
}

static uint8_t *bytes(size_t length) {
    uint8_t *data = malloc(length ? length : 1);
    for (size_t at = 0; at < length; at++) data[at] = (uint8_t)draw(256);
    return data;
}

static uint32_t bitwise(uint32_t crc, const uint8_t *data, size_t length) {
    for (crc = ~crc; length--; data++) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
    }
    return ~crc;
}

static void expect(int right, const char *what, int path) {
    if (right) return;
    fprintf(stderr, "%s differs on path %d\n", what, path);
    exit(1);
}

static size_t up(size_t length) { return (length + 63) / 64 * 64; }

static const size_t WIDTHS[] = {1, 2, 4, 12, 32, 48, 64, 100, 128, 256, 512, 640, 9000};

static void rows(int path) {
    size_t live_rows = 1 + draw(200), count = draw(2 * live_rows), num = 1 + draw(3), length = up(8 * count);
    int64_t row0 = (int64_t)draw(1000), *picked = malloc(8 * count + 1), *ids = malloc(8 * count + 1);
    struct column columns[3];
    uint8_t *live[3];
    size_t offset[3], size[3];
    for (size_t row = 0; row < count; row++) picked[row] = (int64_t)draw(live_rows);
    for (size_t each = 0; each < num; each++) {
        size_t width = WIDTHS[draw(sizeof WIDTHS / sizeof *WIDTHS)], stride = width + (draw(2) ? 0 : draw(70));
        size[each] = (live_rows - 1) * stride + width;
        live[each] = bytes(size[each]);
        offset[each] = length;
        columns[each] = (struct column){live[each], (int64_t)stride, NULL, (int64_t)width, width};
        length += up(count * width);
    }
    uint8_t *payload = bytes(length), *expected = malloc(length + 1);
    memcpy(expected, payload, length);
    for (size_t each = 0; each < num; each++) {
        columns[each].packed = payload + offset[each];
        for (size_t row = 0; row < count; row++)
            memcpy(expected + offset[each] + row * columns[each].width,
                   live[each] + picked[row] * columns[each].stride, columns[each].width);
    }
    for (size_t row = 0; row < count; row++) {
        int64_t id = picked[row] + row0;
        memcpy(expected + 8 * row, &id, 8);
    }
    int64_t crc = stream_ckpt_gather(payload, length, picked, count, row0, (int64_t)live_rows, columns, num);
    expect(memcmp(payload, expected, length) == 0, "a gathered payload", path);
    expect(crc == (int64_t)bitwise(0, expected, length), "its checksum", path);
    if (count) {
        picked[draw(count)] = draw(2) ? (int64_t)(live_rows + draw(9)) : -1 - (int64_t)draw(9);
        expect(stream_ckpt_gather(payload, length, picked, count, row0, (int64_t)live_rows, columns, num) == -1,
               "the answer to a bad row", path);
    }

    /* The payload is placed elsewhere: some ids are outside, and some are not wanted. */
    int64_t begin = (int64_t)draw(live_rows), wanted = (int64_t)draw(live_rows - (size_t)begin + 1), written = 0;
    size_t blocks = (size_t)(((row0 + (int64_t)live_rows - 1) >> 6) - (row0 >> 6) + 1);
    uint8_t *arrived = calloc(live_rows, 1), *flags = calloc(live_rows, 1), *wish[3];
    int32_t *sent = calloc(blocks, sizeof *sent), *newest = calloc(blocks, sizeof *sent);
    for (size_t row = 0; row < count; row++)
        ids[row] = draw(8) ? row0 + (int64_t)draw(live_rows) : (int64_t)(draw(UINT64_MAX));
    for (size_t each = 0; each < num; each++) {
        wish[each] = malloc(size[each]);
        memcpy(wish[each], live[each], size[each]);
    }
    for (size_t row = 0; row < count; row++) {
        if (ids[row] < row0 + begin || ids[row] >= row0 + begin + wanted) continue;
        written++;
        flags[ids[row] - row0] = 1;
        newest[(ids[row] >> 6) - (row0 >> 6)] = 3;
        for (size_t each = 0; each < num; each++)
            memcpy(wish[each] + (ids[row] - row0) * columns[each].stride,
                   columns[each].packed + row * columns[each].width, columns[each].width);
    }
    expect(written == stream_ckpt_place((const uint8_t *)ids, count, row0 + begin, wanted, row0, columns, num, &arrived,
                                        1, draw(4) ? sent : NULL, 6, row0 >> 6, 3),
           "the number of placed rows", path);
    for (size_t each = 0; each < num; each++)
        expect(memcmp(live[each], wish[each], size[each]) == 0, "a placed row", path), free(live[each]), free(wish[each]);
    expect(memcmp(arrived, flags, live_rows) == 0, "an arrival", path);
    for (size_t block = 0; block < blocks; block++)
        expect(sent[block] == 0 || sent[block] == newest[block], "a block", path);
    free(payload), free(expected), free(picked), free(ids), free(arrived), free(flags), free(sent), free(newest);
}

static void digests(int path) {
    const int width = 1 << draw(3);
    size_t num = draw(100), words = draw(150);
    uint8_t *values = bytes(num * words * (size_t)width);
    uint64_t *columns = (uint64_t *)bytes(8 * words), *keys = (uint64_t *)bytes(8 * num), *found = malloc(8 * num + 1);
    int64_t *index = malloc(8 * num + 1);
    for (size_t row = 0; row < num; row++) index[row] = (int64_t)draw(num);
    const int64_t *chosen = draw(2) ? index : NULL;
    expect(stream_ckpt_digest_rows(values, width, chosen, num, words, columns, keys, found) == 0, "a width", path);
    for (size_t row = 0; row < num; row++) {
        const size_t from = chosen ? (size_t)index[row] : row;
        uint64_t sum = 0;
        for (size_t at = 0; at < words; at++) {
            int64_t value = 0;
            memcpy(&value, values + (from * words + at) * (size_t)width, (size_t)width); /* little endian */
            if (value >> (8 * width - 1) & 1) value -= (int64_t)1 << (8 * width);
            sum += (uint64_t)value * columns[at];
        }
        expect(found[row] == sum * keys[row], "a digest", path);
    }
    expect(stream_ckpt_digest_rows(values, 3, NULL, num, words, columns, keys, found) == -1, "the answer to a bad width", path);
    free(values), free(columns), free(keys), free(found), free(index);
}

static void copies(int path) {
    size_t length = draw(draw(2) ? 300 : 40000), to = draw(64), from = draw(64);
    uint8_t *source = bytes(from + length), *target = bytes(to + length), *before = malloc(to + 1);
    memcpy(before, target, to);
    stream_ckpt_copy(target + to, source + from, length);
    expect(memcmp(target + to, source + from, length) == 0, "a copy", path);
    expect(memcmp(target, before, to) == 0, "memory before a copy", path);
    free(source), free(target), free(before);
}

int main(int count, char **given) {
    uint64_t first = count > 1 ? strtoull(given[1], NULL, 10) : 1;
    long calls = count > 2 ? atol(given[2]) : 1000;
    for (int path = 0; path < PATHS; path++) {
        if (stream_ckpt_use(path)) continue;
        seed = first * 2654435761u + 1;
        for (long call = 0; call < calls; call++) {
            size_t length = draw(draw(2) ? 700 : 40000);
            uint8_t *data = bytes(length);
            uint32_t crc = (uint32_t)draw(1ull << 32);
            expect(stream_ckpt_crc(crc, data, length) == bitwise(crc, data, length), "a checksum", path);
            free(data);
            rows(path);
            digests(path);
            copies(path);
        }
        printf("path %d: %ld calls\n", path, calls);
    }
    return 0;
}
