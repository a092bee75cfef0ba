/* One decoder layer over few new tokens of some sequences, with keys and values kept as packed matrices.

   The keys of a head are a matrix with one output per position, its values one with one output per channel: scores and
   mixing are the same product as everything else, the query heads that share a key head being its rows. A sequence
   writes at its own start; whatever lies past its end is masked, so forgetting tokens means starting earlier. */

#include "product.h"

typedef struct {
    long width, inner, heads, kv_heads, head_dim, capacity; /* inner and capacity are multiples of BLOCK */
    float eps;
    const float *cos, *sin; /* [capacity][head_dim] */
    int causal, threads;
} Geometry;

typedef struct {
    Matrix qkv, out, gate_up, down; /* gate and up take turns, block by block */
    const float *norm_in, *norm_mlp, *norm_q, *norm_k; /* gains; the last two may be absent */
    number *keys, *values; /* [slot][kv_head] packed matrices */
} Layer;

typedef struct {
    long sequences, width; /* every sequence reads `width` tokens */
    const int64_t *slots, *starts;
} Pass;

INLINE long keys_size(const Geometry *g) { return g->capacity * g->head_dim; }
INLINE long values_size(const Geometry *g) { return g->capacity * blocks_of(g->head_dim) * BLOCK; }

/* Norm, where there is a gain, and rotary embedding, in place. */
static void turn(const Geometry *g, float *head, const float *gain, long position) {
    long half = g->head_dim / 2;
    const float *cos = g->cos + position * g->head_dim, *sin = g->sin + position * g->head_dim;
    float scale = gain ? 1.0f / sqrtf(mean_square(head, g->head_dim) + g->eps) : 1.0f;
    for (long i = 0; i < half; i++) {
        float low = head[i] * scale, high = head[i + half] * scale;
        if (gain) low *= gain[i], high *= gain[i + half];
        head[i] = low * cos[i] - high * sin[i];
        head[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

static void store(const Geometry *g, const Layer *l, long slot, long kv, long position, const float *k, const float *v) {
    long words = g->head_dim / PAIR;
    number key[g->head_dim];
    scaled(k, g->head_dim, 1.0f, key);
    word *column = (word *)(l->keys + (slot * g->kv_heads + kv) * keys_size(g));
    column += position / BLOCK * words * BLOCK + position % BLOCK;
    for (long i = 0; i < words; i++) column[i * BLOCK] = ((const word *)key)[i];

    number value[g->head_dim], *to = l->values + (slot * g->kv_heads + kv) * values_size(g);
    scaled(v, g->head_dim, 1.0f, value);
    for (long i = 0; i < g->head_dim; i++) {
        long cell = (i / BLOCK * (g->capacity / PAIR) + position / PAIR) * BLOCK + i % BLOCK;
        to[cell * PAIR + position % PAIR] = value[i];
    }
}

/* Scores to operands e^(score - largest); returns one over their sum. Positions from `limit` on get 0. */
static float soften(float *scores, long limit, long padded, number *weights) {
    for (long i = limit; i < padded; i++) scores[i] = -INFINITY;
    vec most = (vec){0} - INFINITY, sum = {0};
    for (long i = 0; i < padded; i += LANES) {
        vec value = *(const vec *)(scores + i);
        most = choose(value > most, value, most);
    }
    float peak = largest(most);
    for (long i = 0; i < padded; i += LANES) {
        vec weight = exponential(*(const vec *)(scores + i) - peak);
        sum += weight;
        put(weights + i, weight, LANES);
    }
    return 1.0f / total(sum);
}

/* Attention of `rows` queries from the first on; queries of one key head lie token by token, then head by head. */
static void attend(const Geometry *g, const Layer *l, const Pass *p, long sequence, long kv, long first, long rows,
                   const number *queries, float *scores, number *weights, number *mixed) {
    long group = g->heads / g->kv_heads, words = g->head_dim / PAIR, start = p->starts[sequence];
    long head = p->slots[sequence] * g->kv_heads + kv;
    const word *keys = (const word *)(l->keys + head * keys_size(g));
    const word *values = (const word *)(l->values + head * values_size(g));
    long visible = start + (g->causal ? (first + rows - 1) / group + 1 : p->width);
    long padded = blocks_of(visible) * BLOCK;
    float scale[GROUP], part[GROUP * BLOCK];
    const word *a = (const word *)(queries + first * g->head_dim);
    for (long at = 0; at < padded; at += BLOCK)
        multiply(rows, a, words, keys + at * words, words, scores + at, g->capacity);
    for (long r = 0; r < rows; r++) {
        long limit = g->causal ? start + (first + r) / group + 1 : visible;
        scale[r] = soften(scores + r * g->capacity, limit, padded, weights + r * g->capacity);
    }
    for (long d = 0; d < g->head_dim; d += BLOCK) {
        const word *cells = values + d * (g->capacity / PAIR);
        multiply(rows, (const word *)weights, g->capacity / PAIR, cells, padded / PAIR, part, BLOCK);
        for (long r = 0; r < rows; r++) {
            long token = sequence * p->width + (first + r) / group, of = kv * group + (first + r) % group;
            number *to = mixed + (token * g->heads + of) * g->head_dim + d;
            for (long i = 0; i < BLOCK && d + i < g->head_dim; i += LANES)
                put(to + i, *(const vec *)(part + r * BLOCK + i) * scale[r], g->head_dim - d - i);
        }
    }
}

/* hidden[r] = silu(gate) * up for one block of the inner width. */
INLINE void activate(const Matrix *gate_up, long block, long rows, const number *a, number *hidden, long inner) {
    float gate[STRIP * BLOCK], up[STRIP * BLOCK];
    for (; rows > 0; rows -= STRIP, a += STRIP * gate_up->in, hidden += STRIP * inner) {
        long some = rows < STRIP ? rows : STRIP;
        outputs(gate_up, 2 * block, some, a, gate);
        outputs(gate_up, 2 * block + 1, some, a, up);
        for (long r = 0; r < some; r++)
            for (long i = 0; i < BLOCK; i += LANES) {
                vec value = *(const vec *)(gate + r * BLOCK + i);
                vec gated = value * sigmoid(value) * *(const vec *)(up + r * BLOCK + i);
                put(hidden + r * inner + block * BLOCK + i, gated, LANES);
            }
    }
}

/* What follows the projection for head h of row r: a query becomes an operand, a key and its value go to the cache. */
static void settle(const Geometry *g, const Layer *l, const Pass *p, long r, long h, float *fused, number *queries) {
    long sequence = r / p->width, token = r % p->width, position = p->starts[sequence] + token;
    float *head = fused + h * g->head_dim;
    if (h >= g->heads) {
        turn(g, head, l->norm_k, position);
        store(g, l, p->slots[sequence], h - g->heads, position, head, head + g->kv_heads * g->head_dim);
        return;
    }
    turn(g, head, l->norm_q, position);
    long group = g->heads / g->kv_heads;
    long row = ((sequence * g->kv_heads + h / group) * p->width + token) * group + h % group;
    scaled(head, g->head_dim, 1.0f / sqrtf((float)g->head_dim), queries + row * g->head_dim);
}

/* The whole layer, in place. With a `gain`, what a draft keeps of its context: keys and values alone, from rows that are
   already features and are normed by it. */
int layer(const Geometry *g, const Layer *l, const Pass *p, float *x, const float *gain) {
    long rows = p->sequences * p->width, pitch = blocks_of(l->qkv.out) * BLOCK;
    long skipped = gain ? g->heads : 0, all = g->heads + g->kv_heads - skipped;
    long group = g->heads / g->kv_heads, tiles = (p->width * group + GROUP - 1) / GROUP;
    size_t for_operands = (size_t)(rows * g->width) * sizeof(number);
    size_t for_fused = (size_t)(rows * pitch) * sizeof(float);
    size_t for_heads = (size_t)(rows * g->heads * g->head_dim) * sizeof(number);
    size_t for_hidden = (size_t)(rows * g->inner) * sizeof(number);
    size_t for_scores = (size_t)(GROUP * g->capacity) * (sizeof(float) + sizeof(number));
    Scratch scratch;
    size_t shared = lines(for_operands) + lines(for_fused) + 2 * lines(for_heads) + lines(for_hidden);
    if (!reserve(&scratch, shared + (size_t)g->threads * lines(for_scores))) return 0;
    number *a = piece(&scratch, for_operands), *queries = piece(&scratch, for_heads);
    number *mixed = piece(&scratch, for_heads), *hidden = piece(&scratch, for_hidden);
    float *fused = piece(&scratch, for_fused);
#pragma omp parallel num_threads(g->threads)
    {
        float *scores;
#pragma omp critical
        scores = piece(&scratch, for_scores);
        number *weights = (number *)(scores + GROUP * g->capacity);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            operands(x + r * g->width, g->width, gain ? gain : l->norm_in, g->eps, a + r * g->width);
#pragma omp for schedule(static)
        for (long block = skipped * g->head_dim / BLOCK; block < blocks_of(l->qkv.out); block++)
            project(&l->qkv, block, rows, a, fused, pitch);
#pragma omp for schedule(static)
        for (long task = 0; task < rows * all; task++)
            settle(g, l, p, task / all, skipped + task % all, fused + task / all * pitch, queries);
        if (!gain) {
#pragma omp for schedule(static)
            for (long task = 0; task < p->sequences * g->kv_heads * tiles; task++) {
                long head = task / tiles, first = task % tiles * GROUP, left = p->width * group - first;
                attend(g, l, p, head / g->kv_heads, head % g->kv_heads, first, left < GROUP ? left : GROUP,
                       queries + head * p->width * group * g->head_dim, scores, weights, mixed);
            }
#pragma omp for schedule(static)
            for (long block = 0; block < blocks_of(l->out.out); block++) emit(&l->out, block, rows, mixed, 1, 0, x);
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++) operands(x + r * g->width, g->width, l->norm_mlp, g->eps, a + r * g->width);
#pragma omp for schedule(static)
            for (long block = 0; block < g->inner / BLOCK; block++)
                activate(&l->gate_up, block, rows, a, hidden, g->inner);
#pragma omp for schedule(static)
            for (long block = 0; block < blocks_of(l->down.out); block++) emit(&l->down, block, rows, hidden, 1, 0, x);
        }
    }
    free(scratch.base);
    return 1;
}
