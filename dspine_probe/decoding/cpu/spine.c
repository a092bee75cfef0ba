/* DSpine beside its layers: adjacent causal injection, the last write repeated, the scores of all pairs, and the walk.

   Rows are the slots of all blocks, block by block; slot 0 is the anchor's (arXiv 2609.36173). What a predecessor sends
   is a row of two halves, its part of the gate and its message, either read off the block or taken from a table. */

#include "product.h"

typedef struct {
    long width, rank, message;
    Matrix readout, mix, write; /* mix: receiver's gate, predecessor's gate, message; the layers share it and the bias */
    const float *bias;
    int threads;
} Injection;

/* sigmoid(receiver + predecessor + bias) * message, channel by channel, as operands of the write. */
static void gate(const Injection *j, const float *receiver, const float *sent, number *to) {
    for (long i = 0; i < j->message; i += LANES) {
        long left = j->message - i;
        vec open = sigmoid(load(receiver + i, left) + load(sent + i, left) + load(j->bias + i, left));
        put(to + i, open * load(sent + j->message + i, left), left);
    }
}

/* The feature sqrt(rank) * read / |read|, as operands. */
static void feature(long rank, const float *read, number *to) {
    float norm = sqrtf(mean_square(read, rank) * (float)rank);
    float scale = sqrtf((float)rank) / (norm > 1e-12f ? norm : 1e-12f);
    scaled(read, rank, scale, to);
}

/* One layer's injection, in place. `mixed` [row][3 * message], padded to whole blocks, receives what every slot reads
   and sends; slot 0 sends the anchor's true code. */
int inject(const Injection *j, long blocks, long slots, float *x, const number *anchor_codes, float *mixed) {
    long rows = blocks * slots, pitch = blocks_of(j->rank) * BLOCK, channels = blocks_of(3 * j->message) * BLOCK;
    size_t for_operands = (size_t)(rows * j->width) * sizeof(number), for_read = (size_t)(rows * pitch) * sizeof(float);
    size_t for_features = (size_t)(rows * j->rank) * sizeof(number), for_scale = (size_t)rows * sizeof(float);
    size_t for_gated = (size_t)(rows * j->message) * sizeof(number);
    Scratch scratch;
    if (!reserve(&scratch, lines(for_operands) + lines(for_read) + lines(for_features) + lines(for_scale) + for_gated))
        return 0;
    number *a = piece(&scratch, for_operands), *features = piece(&scratch, for_features);
    float *read = piece(&scratch, for_read), *scale = piece(&scratch, for_scale);
    number *through = piece(&scratch, for_gated);
#pragma omp parallel num_threads(j->threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            operands(x + r * j->width, j->width, 0, 0, a + r * j->width);
            scale[r] = r % slots ? sqrtf(mean_square(x + r * j->width, j->width)) : 0.0f;
        }
#pragma omp for schedule(static)
        for (long block = 0; block < blocks_of(j->rank); block++)
            project(&j->readout, block, rows, a, read, pitch);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            if (r % slots)
                feature(j->rank, read + r * pitch, features + r * j->rank);
            else
                memcpy(features + r * j->rank, anchor_codes + r / slots * j->rank, (size_t)j->rank * sizeof(number));
        }
#pragma omp for schedule(static)
        for (long block = 0; block < blocks_of(3 * j->message); block++)
            project(&j->mix, block, rows, features, mixed, channels);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            const float *sender = mixed + (r % slots ? r - 1 : r) * channels + j->message;
            gate(j, mixed + r * channels, sender, through + r * j->message);
        }
#pragma omp for schedule(static)
        for (long block = 0; block < blocks_of(j->width); block++)
            emit(&j->write, block, rows, through, 1, scale, x);
    }
    free(scratch.base);
    return 1;
}

typedef struct {
    const Injection *last;
    const float *gain; /* of the final norm */
    float eps;
    const number *sent; /* [draft_vocab][2 * message]: what every token of the draft's vocabulary sends */
    const number *head; /* [draft_vocab][width], row by row */
} LastWrite;

/* Rows of the head of some tokens, packed. */
static void gather(const LastWrite *f, long k, const int64_t *candidates, word *cells) {
    long words = f->last->width / PAIR;
    for (long b = 0; b < k; b++) {
        const word *row = (const word *)(f->head + candidates[b] * f->last->width);
        word *column = cells + b / BLOCK * words * BLOCK + b % BLOCK;
        for (long i = 0; i < words; i++) column[i * BLOCK] = row[i];
    }
}

/* Scores of the k candidates of one slot after each of `count` predecessors, of which `sent` says what they send. */
static void pairs(const LastWrite *f, long k, const float *state, const float *receiver, long count, const float *sent,
                  const int64_t *candidates, float *scores, char *memory) {
    const Injection *j = f->last;
    long words = j->width / PAIR, blocks = blocks_of(k);
    Scratch scratch = {memory, memory};
    float *refined = piece(&scratch, (size_t)(count * j->width) * sizeof(float));
    float *scale = piece(&scratch, (size_t)count * sizeof(float));
    number *through = piece(&scratch, (size_t)(count * j->message) * sizeof(number));
    number *a = piece(&scratch, (size_t)(count * j->width) * sizeof(number));
    word *cells = piece(&scratch, (size_t)(blocks * words * BLOCK) * sizeof(word));
    float *found = piece(&scratch, (size_t)(count * blocks * BLOCK) * sizeof(float));
    float rms = sqrtf(mean_square(state, j->width));
    for (long r = 0; r < count; r++) {
        scale[r] = rms;
        memcpy(refined + r * j->width, state, (size_t)j->width * sizeof(float));
        gate(j, receiver, sent + r * 2 * j->message, through + r * j->message);
    }
    for (long block = 0; block < blocks_of(j->width); block++) emit(&j->write, block, count, through, 1, scale, refined);
    for (long r = 0; r < count; r++) operands(refined + r * j->width, j->width, f->gain, f->eps, a + r * j->width);
    memset(cells, 0, (size_t)(blocks * words * BLOCK) * sizeof(word));
    gather(f, k, candidates, cells);
    for (long block = 0; block < blocks; block++)
        multiply(count, (const word *)a, words, cells + block * words * BLOCK, words, found + block * BLOCK, blocks * BLOCK);
    for (long r = 0; r < count; r++) memcpy(scores + r * k, found + r * blocks * BLOCK, (size_t)k * sizeof(float));
}

INLINE size_t pairs_size(const Injection *j, long k) {
    size_t words = (size_t)(j->width / PAIR), padded = (size_t)(blocks_of(k) * BLOCK), count = (size_t)k;
    return lines(count * (size_t)j->width * sizeof(float)) + lines(count * sizeof(float)) +
           lines(count * (size_t)j->message * sizeof(number)) + lines(count * (size_t)j->width * sizeof(number)) +
           lines(padded * words * sizeof(word)) + lines(count * padded * sizeof(float));
}

/* scores[block][t][a][b] of candidate b of slot t + 1 after candidate a of the slot before it; slot 1 follows the anchor,
   so its rows are equal. `states` are those before the last injection and `mixed` is what that injection left. */
int transitions(const LastWrite *f, long blocks, long slots, long k, const float *states, const float *mixed,
                const int64_t *candidates, float *scores) {
    const Injection *j = f->last;
    long drafted = slots - 1, channels = blocks_of(3 * j->message) * BLOCK;
    size_t for_sent = (size_t)(k * 2 * j->message) * sizeof(float), each = lines(for_sent) + pairs_size(j, k);
    Scratch scratch;
    if (!reserve(&scratch, (size_t)j->threads * each)) return 0;
#pragma omp parallel num_threads(j->threads)
    {
        float *sent;
#pragma omp critical
        sent = piece(&scratch, each);
#pragma omp for schedule(static)
        for (long task = 0; task < blocks * drafted; task++) {
            long block = task / drafted, t = task % drafted, row = block * slots + t + 1;
            const int64_t *before = candidates + (task - 1) * k;
            long count = t ? k : 1;
            for (long r = 0; r < count; r++)
                for (long i = 0; i < 2 * j->message; i += LANES) {
                    long left = 2 * j->message - i;
                    const float *anchor = mixed + block * slots * channels + j->message + i;
                    vec value = t ? fetch(f->sent + before[r] * 2 * j->message + i, left) : load(anchor, left);
                    keep(sent + r * 2 * j->message + i, value, left);
                }
            pairs(f, k, states + row * j->width, mixed + row * channels, count, sent, candidates + task * k,
                  scores + task * k * k, (char *)sent + lines(for_sent));
            for (long r = count; r < k; r++)
                memcpy(scores + (task * k + r) * k, scores + task * k * k, (size_t)k * sizeof(float));
        }
    }
    free(scratch.base);
    return 1;
}

/* The greedy walk: the best candidate of slot 1, then of each slot given the one before it; the first among equals. */
int walk(long blocks, long drafted, long k, const float *scores, const int64_t *candidates, int64_t *tokens) {
    for (long block = 0; block < blocks; block++) {
        long choice = 0;
        for (long t = 0; t < drafted; t++) {
            long slot = block * drafted + t;
            const float *row = scores + (slot * k + choice) * k;
            choice = 0;
            for (long b = 1; b < k; b++)
                if (row[b] > row[choice]) choice = b;
            tokens[slot] = candidates[slot * k + choice];
        }
    }
    return 1;
}
