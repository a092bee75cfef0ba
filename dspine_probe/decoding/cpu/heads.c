/* Products outside the layers: all outputs of every row, or the few largest.

   Every function returns 1, or 0 where there was no memory for it. */

#include "product.h"

long block_size(void) { return BLOCK; }

/* 0 if the system does not let these kernels use the matrix unit; 2 if they use it, 1 if they do without. */
int allowed(void) {
#if HALF && AMX && defined(__AMX_BF16__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? 0 : 2;
#else
    return 1;
#endif
}

/* y[r] = w x[r], or w norm(x[r]) where there is a gain. */
int product(const Matrix *w, long rows, const float *x, const float *gain, float eps, float *y, int threads) {
    Scratch scratch;
    if (!reserve(&scratch, (size_t)(rows * w->in) * sizeof(number))) return 0;
    number *a = piece(&scratch, (size_t)(rows * w->in) * sizeof(number));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) operands(x + r * w->in, w->in, gain, eps, a + r * w->in);
#pragma omp for schedule(static)
        for (long block = 0; block < blocks_of(w->out); block++) emit(w, block, rows, a, 0, 0, y);
    }
    free(scratch.base);
    return 1;
}

typedef struct {
    float score;
    int64_t id;
} Entry;

/* Take a score into a list of the k best, best first, the lower id first among equals. */
static void take(Entry *list, long k, float score, int64_t id) {
    long at = k;
    for (; at > 0; at--) {
        Entry *above = &list[at - 1];
        if (!(score > above->score || (score == above->score && id < above->id))) break;
        if (at < k) list[at] = *above;
    }
    if (at < k) list[at] = (Entry){score, id};
}

/* Take what one block of outputs has to offer; once a list is full, that is mostly nothing. */
INLINE void offer(Entry *list, long k, const float *scores, int64_t first, long count) {
    float last = list[k - 1].score;
    if (!any((*(const vec *)scores > last) | (*(const vec *)(scores + LANES) > last))) return;
    for (long i = 0; i < BLOCK && i < count; i++)
        if (scores[i] > list[k - 1].score) take(list, k, scores[i], first + i);
}

/* ids[r][0..k): the outputs of w norm(x[r]) with the largest scores, best first, the lower id first among equals. */
int best(const Matrix *w, long rows, const float *x, const float *gain, float eps, long k, int64_t *ids, int threads) {
    size_t for_operands = (size_t)(rows * w->in) * sizeof(number), for_lists = (size_t)(rows * k) * sizeof(Entry);
    Scratch scratch;
    if (!reserve(&scratch, lines(for_operands) + (size_t)(threads + 1) * lines(for_lists))) return 0;
    number *a = piece(&scratch, for_operands);
    Entry *found = piece(&scratch, for_lists);
    for (long i = 0; i < rows * k; i++) found[i] = (Entry){-INFINITY, 0};
#pragma omp parallel num_threads(threads)
    {
        Entry *lists;
#pragma omp critical
        lists = piece(&scratch, for_lists);
        memcpy(lists, found, for_lists);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) operands(x + r * w->in, w->in, gain, eps, a + r * w->in);
#pragma omp for schedule(static)
        for (long block = 0; block < blocks_of(w->out); block++) {
            float scores[STRIP * BLOCK];
            for (long first = 0; first < rows; first += STRIP) {
                long some = rows - first < STRIP ? rows - first : STRIP;
                outputs(w, block, some, a + first * w->in, scores);
                for (long r = 0; r < some; r++)
                    offer(lists + (first + r) * k, k, scores + r * BLOCK, block * BLOCK, w->out - block * BLOCK);
            }
        }
#pragma omp critical
        for (long i = 0; i < rows * k; i++) take(found + i / k * k, k, lists[i].score, lists[i].id);
    }
    for (long i = 0; i < rows * k; i++) ids[i] = found[i].id;
    free(scratch.base);
    return 1;
}
