/* Transposing copies between lines of memory: out[j][i] = in[i][j].
 *
 * A C-ordered array has its rows as lines, ranks have their columns. Tiles of vector registers are
 * transposed into a buffer that stays in the cache. From there each line is written in runs of about 2 KiB,
 * past the cache (`stream`), because a store through it would first read every cache line. The lines
 * of the next tile are prefetched: a processor follows one line by itself, but not eight at a time. The
 * next input of the buffer is prefetched while the buffer is written, so that memory does both at a time.
 *
 * Plain C with vector instructions chosen at run time; no dependency, no Python API.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#endif

enum { PLAIN, AVX2, AVX512 };
/* Bytes of an output line and of an input line that pass through the buffer at a time; lines of the
 * buffer, and their distance: they must not share cache sets. 264 KiB, a part of the L2 cache. */
enum { RUN = 2048, ACROSS = 1024, LINES = 128, PITCH = RUN + 64 };

int alchemist_copy_level(void)
{
#if X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return AVX512;
    if (__builtin_cpu_supports("avx2"))
        return AVX2;
#endif
    return PLAIN;
}

/* Transposes a small tile from lines at byte `offset` into a buffer with lines of `pitch` bytes. */
typedef void (*tile_fn)(const char *const *in, ptrdiff_t offset, char *buffer, ptrdiff_t pitch);

#if X86
__attribute__((target("avx512f"))) static void tile8_avx512(
    const char *const *in, ptrdiff_t offset, char *buffer, ptrdiff_t pitch)
{
    __m512d r[8], a[8], b[8];
    for (int k = 0; k < 8; k++)
        r[k] = _mm512_loadu_pd(in[k] + offset);
    for (int k = 0; k < 8; k += 2) {
        a[k] = _mm512_unpacklo_pd(r[k], r[k + 1]);
        a[k + 1] = _mm512_unpackhi_pd(r[k], r[k + 1]);
    }
    for (int k = 0; k < 2; k++) {
        b[k] = _mm512_shuffle_f64x2(a[k], a[k + 2], 0x88);
        b[k + 2] = _mm512_shuffle_f64x2(a[k], a[k + 2], 0xdd);
        b[k + 4] = _mm512_shuffle_f64x2(a[k + 4], a[k + 6], 0x88);
        b[k + 6] = _mm512_shuffle_f64x2(a[k + 4], a[k + 6], 0xdd);
    }
    for (int k = 0; k < 4; k++) {
        _mm512_storeu_pd(buffer + k * pitch, _mm512_shuffle_f64x2(b[k], b[k + 4], 0x88));
        _mm512_storeu_pd(buffer + (k + 4) * pitch, _mm512_shuffle_f64x2(b[k], b[k + 4], 0xdd));
    }
}

__attribute__((target("avx2"))) static void tile8_avx2(
    const char *const *in, ptrdiff_t offset, char *buffer, ptrdiff_t pitch)
{
    __m256d r[4], a[4];
    for (int k = 0; k < 4; k++)
        r[k] = _mm256_loadu_pd((const double *)(in[k] + offset));
    for (int k = 0; k < 4; k += 2) {
        a[k] = _mm256_unpacklo_pd(r[k], r[k + 1]);
        a[k + 1] = _mm256_unpackhi_pd(r[k], r[k + 1]);
    }
    for (int k = 0; k < 2; k++) {
        _mm256_storeu_pd((double *)(buffer + k * pitch), _mm256_permute2f128_pd(a[k], a[k + 2], 0x20));
        _mm256_storeu_pd(
            (double *)(buffer + (k + 2) * pitch), _mm256_permute2f128_pd(a[k], a[k + 2], 0x31));
    }
}

__attribute__((target("avx2"))) static void tile4_avx2(
    const char *const *in, ptrdiff_t offset, char *buffer, ptrdiff_t pitch)
{
    __m256 r[8], a[8], b[8];
    for (int k = 0; k < 8; k++)
        r[k] = _mm256_loadu_ps((const float *)(in[k] + offset));
    for (int k = 0; k < 8; k += 2) {
        a[k] = _mm256_unpacklo_ps(r[k], r[k + 1]);
        a[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
    }
    for (int k = 0; k < 8; k += 4)
        for (int h = 0; h < 2; h++) {
            b[k + 2 * h] = _mm256_shuffle_ps(a[k + h], a[k + h + 2], 0x44);
            b[k + 2 * h + 1] = _mm256_shuffle_ps(a[k + h], a[k + h + 2], 0xee);
        }
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_ps((float *)(buffer + k * pitch), _mm256_permute2f128_ps(b[k], b[k + 4], 0x20));
        _mm256_storeu_ps(
            (float *)(buffer + (k + 4) * pitch), _mm256_permute2f128_ps(b[k], b[k + 4], 0x31));
    }
}

__attribute__((target("avx512f"))) static void tile16_avx512(
    const char *const *in, ptrdiff_t offset, char *buffer, ptrdiff_t pitch)
{
    __m512d r[4], a[4];
    for (int k = 0; k < 4; k++)
        r[k] = _mm512_loadu_pd(in[k] + offset);
    for (int k = 0; k < 4; k += 2) {
        a[k] = _mm512_shuffle_f64x2(r[k], r[k + 1], 0x44);
        a[k + 1] = _mm512_shuffle_f64x2(r[k], r[k + 1], 0xee);
    }
    for (int k = 0; k < 2; k++) {
        _mm512_storeu_pd(buffer + 2 * k * pitch, _mm512_shuffle_f64x2(a[k], a[k + 2], 0x88));
        _mm512_storeu_pd(buffer + (2 * k + 1) * pitch, _mm512_shuffle_f64x2(a[k], a[k + 2], 0xdd));
    }
}

__attribute__((target("avx2"))) static void tile16_avx2(
    const char *const *in, ptrdiff_t offset, char *buffer, ptrdiff_t pitch)
{
    __m256d a = _mm256_loadu_pd((const double *)(in[0] + offset));
    __m256d b = _mm256_loadu_pd((const double *)(in[1] + offset));
    _mm256_storeu_pd((double *)buffer, _mm256_permute2f128_pd(a, b, 0x20));
    _mm256_storeu_pd((double *)(buffer + pitch), _mm256_permute2f128_pd(a, b, 0x31));
}

/* Copies a run of bytes past the cache, except for the cache lines at its ends. */
static void write_run(char *to, const char *from, size_t nbytes)
{
    size_t head = -(uintptr_t)to & 63;
    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64)
        for (int k = 0; k < 64; k += 16)
            _mm_stream_si128((__m128i *)(to + k), _mm_loadu_si128((const __m128i *)(from + k)));
    memcpy(to, from, nbytes);
}
#endif

#define ONE_BY_ONE(T)                                                                              \
    for (ptrdiff_t i = i0; i < i1; i++)                                                            \
        for (ptrdiff_t j = j0; j < j1; j++)                                                        \
            memcpy(buffer + (j - j0) * pitch + (i - i0) * sizeof(T), in[i] + j * sizeof(T),        \
                sizeof(T));

typedef struct {
    char bytes[16];
} sixteen;

/* Elements [i0, i1) x [j0, j1) without tiles. */
static void scalar(const char *const *in, ptrdiff_t i0, ptrdiff_t i1, ptrdiff_t j0, ptrdiff_t j1,
    char *buffer, ptrdiff_t pitch, ptrdiff_t itemsize)
{
    switch (itemsize) {
    case 1: ONE_BY_ONE(uint8_t) break;
    case 2: ONE_BY_ONE(uint16_t) break;
    case 4: ONE_BY_ONE(uint32_t) break;
    case 8: ONE_BY_ONE(uint64_t) break;
    default: ONE_BY_ONE(sixteen)
    }
}

/* out[j][i] = in[i][j] for m input lines of n elements; itemsize 1, 2, 4, 8 or 16. */
void alchemist_transpose(const char *const *in, ptrdiff_t m, char *const *out, ptrdiff_t n,
    ptrdiff_t itemsize, int level, int stream)
{
    char buffer[LINES * PITCH] __attribute__((aligned(64)));
    const ptrdiff_t pitch = PITCH, down = RUN / itemsize;
    const ptrdiff_t across = ACROSS / itemsize < LINES ? ACROSS / itemsize : LINES;
    tile_fn tile = NULL;
    ptrdiff_t width = 1;
#if X86
    if (itemsize == 8 && level >= AVX512)
        tile = tile8_avx512, width = 8;
    else if (itemsize == 8 && level >= AVX2)
        tile = tile8_avx2, width = 4;
    else if (itemsize == 4 && level >= AVX2)
        tile = tile4_avx2, width = 8;
    else if (itemsize == 16 && level >= AVX512)
        tile = tile16_avx512, width = 4;
    else if (itemsize == 16 && level >= AVX2)
        tile = tile16_avx2, width = 2;
#endif
    for (ptrdiff_t i0 = 0; i0 < m; i0 += down) {
        ptrdiff_t i1 = i0 + down < m ? i0 + down : m;
        for (ptrdiff_t j0 = 0; j0 < n; j0 += across) {
            ptrdiff_t j1 = j0 + across < n ? j0 + across : n;
            if (!tile || i1 - i0 < width || j1 - j0 < width)
                scalar(in, i0, i1, j0, j1, buffer, pitch, itemsize);
            else /* the last tiles overlap those before them */
                for (ptrdiff_t i = i0; i < i1; i += width) {
                    ptrdiff_t row = i < i1 - width ? i : i1 - width;
                    for (ptrdiff_t j = j0; j < j1; j += width) {
                        ptrdiff_t column = j < j1 - width ? j : j1 - width;
                        if (i + 2 * width <= m)
                            for (ptrdiff_t k = i + width; k < i + 2 * width; k++)
                                __builtin_prefetch(in[k] + column * itemsize);
                        tile(in + row, column * itemsize,
                            buffer + (column - j0) * pitch + (row - i0) * itemsize, pitch);
                    }
                }
            ptrdiff_t next_i = j1 < n ? i0 : i1, next_j = j1 < n ? j1 : 0;
            ptrdiff_t lines = next_i + down < m ? down : m - next_i;
            ptrdiff_t nbytes = (next_j + across < n ? across : n - next_j) * itemsize;
            for (ptrdiff_t j = j0; j < j1; j++) {
                ptrdiff_t last = next_i + lines * (j + 1 - j0) / (j1 - j0);
                for (ptrdiff_t i = next_i + lines * (j - j0) / (j1 - j0); i < last; i++)
                    for (ptrdiff_t k = 0; k < nbytes; k += 64)
                        __builtin_prefetch(in[i] + next_j * itemsize + k);
                char *to = out[j] + i0 * itemsize;
                const char *from = buffer + (j - j0) * pitch;
#if X86
                if (stream) {
                    write_run(to, from, (i1 - i0) * itemsize);
                    continue;
                }
#endif
                memcpy(to, from, (i1 - i0) * itemsize);
            }
        }
    }
#if X86
    if (stream)
        _mm_sfence();
#endif
}

static _Thread_local sigjmp_buf *way_out; /* of a guarded copy of this thread */
static struct sigaction earlier;

static void on_bus_error(int number, siginfo_t *about, void *context)
{
    if (way_out)
        siglongjmp(*way_out, 1);
    if (earlier.sa_flags & SA_SIGINFO)
        earlier.sa_sigaction(number, about, context);
    else if (earlier.sa_handler == SIG_DFL || earlier.sa_handler == SIG_IGN)
        signal(number, SIG_DFL); /* the access is repeated, and ends the process */
    else
        earlier.sa_handler(number);
}

/* The same where memory is a mapped file: -1 if a page of it cannot be read, because the file was
 * truncated or its disk failed. That is a SIGBUS, which would end the process. */
int alchemist_transpose_guarded(const char *const *in, ptrdiff_t m, char *const *out, ptrdiff_t n,
    ptrdiff_t itemsize, int level, int stream)
{
    struct sigaction now, ours = {.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigjmp_buf here;
    if (sigaction(SIGBUS, NULL, &now))
        return -1;
    if (now.sa_sigaction != on_bus_error) {
        earlier = now;
        ours.sa_sigaction = on_bus_error;
        if (sigaction(SIGBUS, &ours, NULL))
            return -1;
    }
    if (sigsetjmp(here, 1)) {
        way_out = NULL;
        return -1;
    }
    way_out = &here;
    alchemist_transpose(in, m, out, n, itemsize, level, stream);
    way_out = NULL;
    return 0;
}
