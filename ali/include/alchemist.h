/* The Alchemist-Library Interface for C (C11): how a shared object plugs into a gang of MPI ranks.
 *
 *     static int scale(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
 *         const alchemist_matrix *A = in[0].matrix;
 *         alchemist_matrix *B = alchemist_new_like(call, A);
 *         if (B == NULL) return ALCHEMIST_FAILED;
 *         ...
 *         out[0].matrix = B;
 *         return ALCHEMIST_OK;
 *     }
 *     static const alchemist_routine routines[] = {
 *         {.name = "scale", .doc = "B = factor * A.", .run = scale,
 *          .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_MATRIX, "of float64"},
 *                                             {"factor", ALCHEMIST_FLOAT, "the factor", "2.0"}),
 *          .results = ALCHEMIST_RESULTS({"B", ALCHEMIST_MATRIX, "in A's layout"})},
 *         {0}};
 *     ALCHEMIST_LIBRARY("mylib", "Purpose of the library.", routines)
 *
 *     mpicc -shared -fPIC -I"$(alchemist include)" -o libmylib.so mylib.c -l...
 *     lib = als.load_library("mylib", "libmylib.so");  B = lib.scale(A, factor=3.0)
 *
 * Every routine runs on every rank of the gang at once, with that rank's part of each matrix. The
 * library links against MPI only: the functions of the host come in a struct, `call->host`, and are
 * called through the inline functions below.
 *
 * Memory: matrices, strings and lists belong to the host. They are valid until the routine returns;
 * results stay in the gang. Only `call->state` belongs to the library.
 */
#ifndef ALCHEMIST_H
#define ALCHEMIST_H

#include <mpi.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A host loads only libraries with the same number; it increases when anything below changes, but
 * for new types of values, and functions at the end of alchemist_host. */
#define ALCHEMIST_ABI 4

enum { ALCHEMIST_OK = 0, ALCHEMIST_FAILED = 1, ALCHEMIST_ENDED = 2 };

/* Types of parameters and results; the comment names the member of alchemist_value. */
typedef enum {
    ALCHEMIST_MATRIX = 1,   /* matrix */
    ALCHEMIST_INT = 2,      /* integer */
    ALCHEMIST_FLOAT = 3,    /* number */
    ALCHEMIST_BOOL = 4,     /* flag: 0 or 1 */
    ALCHEMIST_STRING = 5,   /* string: UTF-8, ends with a zero byte */
    ALCHEMIST_COMPLEX = 6,  /* complex_number */
    ALCHEMIST_INTS = 7,     /* integers, with count */
    ALCHEMIST_FLOATS = 8,   /* numbers, with count */
    ALCHEMIST_BOOLS = 9,    /* flags, with count */
    ALCHEMIST_STRINGS = 10, /* strings, with count */
    ALCHEMIST_SPARSE = 11,  /* sparse: a sparse matrix; no routine changes one in place */
    /* Parameters only: a matrix that the routine does not change, or changes in place (through
     * `data`). With ALCHEMIST_MATRIX the gang assumes that it is changed: recovery treats it as
     * lost with the call, and others' fetches wait. If one parameter says so, all matrices must. */
    ALCHEMIST_MATRIX_READ = 1 | 1 << 8,
    ALCHEMIST_MATRIX_WRITTEN = 1 | 2 << 8
} alchemist_type;

typedef enum {
    ALCHEMIST_FLOAT32 = 1,
    ALCHEMIST_FLOAT64 = 2,
    ALCHEMIST_COMPLEX64 = 3,  /* two floats, as C's float _Complex */
    ALCHEMIST_COMPLEX128 = 4, /* two doubles */
    ALCHEMIST_INT32 = 5,
    ALCHEMIST_INT64 = 6,
    ALCHEMIST_BOOL8 = 7, /* one byte, 0 or 1, as C's bool */
    ALCHEMIST_INT8 = 8,
    ALCHEMIST_INT16 = 9,
    ALCHEMIST_UINT8 = 10,
    ALCHEMIST_UINT16 = 11,
    ALCHEMIST_UINT32 = 12,
    ALCHEMIST_UINT64 = 13,
    ALCHEMIST_FLOAT16 = 14 /* two bytes, as C23's _Float16 */
} alchemist_dtype;

/* Elemental's layouts: the distribution of rows and columns over the grid of ranks. VC_STAR: row i
 * is on rank i % size. MC_MR: element (i, j) is on rank (i % height) + (j % width) * height. */
typedef enum {
    ALCHEMIST_MC_MR = 1,
    ALCHEMIST_MC_STAR = 2,
    ALCHEMIST_MD_STAR = 3,
    ALCHEMIST_MR_MC = 4,
    ALCHEMIST_MR_STAR = 5,
    ALCHEMIST_STAR_MC = 6,
    ALCHEMIST_STAR_MD = 7,
    ALCHEMIST_STAR_MR = 8,
    ALCHEMIST_STAR_STAR = 9,
    ALCHEMIST_STAR_VC = 10,
    ALCHEMIST_STAR_VR = 11,
    ALCHEMIST_VC_STAR = 12,
    ALCHEMIST_VR_STAR = 13,
    ALCHEMIST_CIRC_CIRC = 14,
    /* One block for each rank of the grid: MC_MR with ceil(rows / height) x ceil(cols / width)
     * blocks. */
    ALCHEMIST_BLOCK = ALCHEMIST_MC_MR | 0x7fffff << 8,
    /* Whole rows, one block for each rank: ceil(rows / size) rows. */
    ALCHEMIST_ROW_BLOCKS = ALCHEMIST_VC_STAR | 0x7fffff << 8,
    ALCHEMIST_LAYOUT_BITS = 0x7fffffff /* no layout: so that the type has room for block sizes */
} alchemist_layout;

/* ScaLAPACK's block-cyclic layout, MC_MR with nb x nb blocks; 2 <= nb < 0x7fffff. Layouts of rows,
 * columns and transposes of such matrices are Elemental's with the same bits above the lowest 8. */
#define ALCHEMIST_BLOCK_CYCLIC(nb) ((alchemist_layout)(ALCHEMIST_MC_MR | (nb) << 8))

/* One rank's part of a matrix, or of a vector, which is stored as one column. Any length may be 0.
 * Local element (i, j) is data[i + j * leading_dimension], and global element
 * (alchemist_global_row(matrix, i), alchemist_global_col(matrix, j)): row_block neighbouring rows
 * from row_shift on, again after each row_stride rows. Blocks are of one row and column but in
 * layouts of blocks: there global row row_shift + i * row_stride is local row i. A rank without
 * elements has local_rows or local_cols 0. Parameters are read-only, but those of type
 * ALCHEMIST_MATRIX_WRITTEN; results are written. */
typedef struct {
    int64_t rows, cols; /* of the whole matrix */
    alchemist_dtype dtype;
    alchemist_layout layout;
    int32_t grid_height, grid_width; /* rank r is at row r % height, column r / height */
    /* Of the array that clients see: 2, 1 for a vector, 0 for a number. To return a vector, set it
     * to 1 in a new matrix with one column. */
    int32_t dimensions;
    int64_t local_rows, local_cols;
    int64_t leading_dimension; /* elements from one local column to the next, >= 1 */
    int64_t row_shift, row_stride;
    int64_t col_shift, col_stride;
    int64_t row_block, col_block;
    void *data; /* column-major */
} alchemist_matrix;

/* One rank's rows of a sparse matrix, in CSR: ceil(rows / size) rows from first_row on, the last
 * ranks fewer or none; those that the rank has of a matrix in VC_STAR with one block for each rank
 * (ALCHEMIST_ROW_BLOCKS). Local row i has the elements starts[i] to starts[i + 1], with global
 * columns: read them with alchemist_start and alchemist_column. Parameters are read-only. */
typedef struct {
    int64_t rows, cols; /* of the whole matrix */
    int64_t elements;   /* stored, on all ranks */
    alchemist_dtype dtype;
    alchemist_dtype index; /* of starts and columns: ALCHEMIST_INT32, or INT64 for large ones */
    int64_t first_row, local_rows;
    int64_t local_elements;
    void *starts;  /* local_rows + 1 numbers, from 0 on */
    void *columns; /* local_elements */
    void *data;    /* local_elements */
} alchemist_sparse;

/* An argument or a result; its type selects the member. */
typedef struct {
    int32_t given; /* 0: an optional argument that the caller left out, or gave as None */
    int64_t count; /* elements of a list */
    union {
        const alchemist_matrix *matrix;
        const alchemist_sparse *sparse;
        int64_t integer;
        double number;
        double complex_number[2];
        int32_t flag;
        const char *string;
        const int64_t *integers;
        const double *numbers;
        const int32_t *flags;
        const char *const *strings;
    };
} alchemist_value;

typedef struct alchemist_host alchemist_host;

/* A call of a routine, on this rank. */
typedef struct {
    const alchemist_host *host;
    /* The gang's; it changes after a failed call: read it in each call. An error of MPI on it fails
     * the call with RoutineError. MPICH then returns MPI_SUCCESS to the caller: to handle errors by
     * return codes, set MPI_ERRORS_RETURN on it (in each call) or on a duplicate. */
    MPI_Comm comm;
    int32_t rank, size;
    int32_t grid_height, grid_width;
    /* The library's own pointer, kept from call to call; one per session, name and rank. Loading
     * the same name again closes the old state and starts with NULL. */
    void *state;
} alchemist_call;

/* Functions of the host. A return value other than 0, or NULL, means failure: the host has recorded
 * the cause; return ALCHEMIST_FAILED. */
struct alchemist_host {
    int32_t abi; /* of the host: it has the functions that are marked with this number or less */
    /* A distributed matrix of zeros. Every rank passes the same arguments; no communication. */
    alchemist_matrix *(*new_matrix)(alchemist_call *, int64_t rows, int64_t cols, alchemist_dtype,
                                    alchemist_layout);
    /* The matrix in another layout; the same matrix if it has that layout. Collective. */
    const alchemist_matrix *(*to_layout)(alchemist_call *, const alchemist_matrix *,
                                         alchemist_layout);
    /* Memory for a result's string or list. */
    void *(*allocate)(alchemist_call *, size_t bytes);
    /* ALCHEMIST_ENDED if the call has failed on another rank or was cancelled, else 0. */
    int (*check)(alchemist_call *);
    void (*progress)(alchemist_call *, double fraction, const char *text);
    /* Sets the error message. kind 0: the routine failed (RoutineError); 1: bad arguments
     * (BadArgumentError). */
    void (*fail)(alchemist_call *, int32_t kind, const char *message);
    void (*span)(alchemist_call *, const char *name); /* 3; begins one; NULL: ends the last one */
    void (*waited)(alchemist_call *, double seconds); /* 4; for als.trace and als.profile */
    /* 5; a sparse matrix whose three arrays the library fills on each rank. Collective. */
    alchemist_sparse *(*new_sparse)(alchemist_call *, int64_t rows, int64_t cols,
                                    int64_t local_elements, alchemist_dtype);
    /* 6; the address of a copy of this rank's part on its GPU */
    const void *(*device_pointer)(alchemist_call *, const alchemist_matrix *);
    /* 7; fields for and from a call of another gang, and for viewers. Collective. */
    int (*channel_send)(alchemist_call *, const char *name, const alchemist_matrix *);
    int (*channel_receive)(alchemist_call *, const char *name, const alchemist_matrix *out);
    int (*show)(alchemist_call *, const char *name, const alchemist_matrix *);
};

typedef struct {
    const char *name;
    alchemist_type type;
    const char *doc;
    /* NULL: required. Else JSON: "10", "0.5", "true", "\"text\"", "[1, 2]"; a complex number is
     * "[real, imaginary]" or "real"; "null": optional, and `given` is 0 if it was left out. */
    const char *default_value;
} alchemist_parameter;

typedef struct {
    const char *name;
    alchemist_type type;
    const char *doc;
} alchemist_result;

/* in: one value per parameter; out: one per result, to be set: matrices on every rank, other values
 * on rank 0. Returns ALCHEMIST_OK, or the return value of alchemist_fail, alchemist_refuse or
 * alchemist_check. */
typedef int (*alchemist_function)(alchemist_call *call, const alchemist_value *in,
                                  alchemist_value *out);

typedef struct {
    const char *name;
    const char *doc;
    alchemist_function run;
    const alchemist_parameter *parameters; /* the last has name NULL; NULL if there are none */
    const alchemist_result *results;       /* likewise */
} alchemist_routine;

typedef struct {
    int32_t abi; /* ALCHEMIST_ABI */
    const char *name; /* for display: sessions use the name given to load_library */
    const char *doc;
    const alchemist_routine *routines; /* the last has name NULL */
    /* Called with call->state when the library is unloaded; NULL if not needed. It must not use
     * MPI: other ranks may have ended. */
    void (*close)(void *state);
} alchemist_library;

#define ALCHEMIST_EXPORT __attribute__((visibility("default")))

/* How the functions below are defined: alchemist_fortran.c makes them ordinary functions. */
#ifndef ALCHEMIST_API
#define ALCHEMIST_API static inline
#endif

/* The only symbol that a library exports. */
ALCHEMIST_EXPORT const alchemist_library *alchemist_library_describe(void);

#define ALCHEMIST_PARAMETERS(...) (const alchemist_parameter[]){__VA_ARGS__, {0}}
#define ALCHEMIST_RESULTS(...) (const alchemist_result[]){__VA_ARGS__, {0}}
#define ALCHEMIST_LIBRARY(NAME, DOC, ROUTINES) ALCHEMIST_LIBRARY_CLOSED(NAME, DOC, ROUTINES, NULL)
#define ALCHEMIST_LIBRARY_CLOSED(NAME, DOC, ROUTINES, CLOSE)                              \
    ALCHEMIST_EXPORT const alchemist_library *alchemist_library_describe(void) {          \
        static const alchemist_library library = {ALCHEMIST_ABI, NAME, DOC, ROUTINES, CLOSE}; \
        return &library;                                                                  \
    }

/* --- errors and progress --- */

__attribute__((format(printf, 3, 4))) ALCHEMIST_API int alchemist_error(alchemist_call *call,
                                                                        int32_t kind,
                                                                        const char *format, ...) {
    char message[2048];
    va_list words;
    va_start(words, format);
    vsnprintf(message, sizeof message, format, words);
    va_end(words);
    call->host->fail(call, kind, message);
    return ALCHEMIST_FAILED;
}

/* return alchemist_fail(call, "no convergence after %d steps", steps); */
#define alchemist_fail(CALL, ...) alchemist_error(CALL, 0, __VA_ARGS__)

/* The same for bad arguments. Check values that all ranks see, before the first message. */
#define alchemist_refuse(CALL, ...) alchemist_error(CALL, 1, __VA_ARGS__)

/* In long loops: if ((code = alchemist_check(call))) return code; */
ALCHEMIST_API int alchemist_check(alchemist_call *call) { return call->host->check(call); }

/* On rank 0: report the fraction (0 to 1) that is done. */
ALCHEMIST_API void alchemist_progress(alchemist_call *call, double fraction, const char *text) {
    call->host->progress(call, fraction, text);
}

/* Mark a part of the routine for als.trace and als.profile, on this rank; spans may be nested, and
 * end with the routine at the latest. They cost a few microseconds, and do nothing in older hosts. */
ALCHEMIST_API void alchemist_span_begin(alchemist_call *call, const char *name) {
    if (call->host->abi >= 3) call->host->span(call, name);
}
ALCHEMIST_API void alchemist_span_end(alchemist_call *call) {
    if (call->host->abi >= 3) call->host->span(call, NULL);
}

/* --- matrices --- */

ALCHEMIST_API alchemist_matrix *alchemist_new(alchemist_call *call, int64_t rows, int64_t cols,
                                              alchemist_dtype dtype, alchemist_layout layout) {
    return call->host->new_matrix(call, rows, cols, dtype, layout);
}

/* Of the same shape (also a vector), dtype and layout. */
ALCHEMIST_API alchemist_matrix *alchemist_new_like(alchemist_call *call,
                                                   const alchemist_matrix *like) {
    alchemist_matrix *made =
        call->host->new_matrix(call, like->rows, like->cols, like->dtype, like->layout);
    if (made != NULL) made->dimensions = like->dimensions;
    return made;
}

/* A vector of zeros: a matrix with one column, which clients get with the shape (rows,). */
ALCHEMIST_API alchemist_matrix *alchemist_new_vector(alchemist_call *call, int64_t rows,
                                                     alchemist_dtype dtype,
                                                     alchemist_layout layout) {
    alchemist_matrix *made = call->host->new_matrix(call, rows, 1, dtype, layout);
    if (made != NULL) made->dimensions = 1;
    return made;
}

ALCHEMIST_API const alchemist_matrix *alchemist_to_layout(alchemist_call *call,
                                                          const alchemist_matrix *matrix,
                                                          alchemist_layout layout) {
    return call->host->to_layout(call, matrix, layout);
}

/* A sparse matrix: set starts, columns (both of the type `index`) and data on each rank. */
ALCHEMIST_API alchemist_sparse *alchemist_new_sparse(alchemist_call *call, int64_t rows,
                                                     int64_t cols, int64_t local_elements,
                                                     alchemist_dtype dtype) {
    if (call->host->abi >= 5) return call->host->new_sparse(call, rows, cols, local_elements, dtype);
    alchemist_fail(call, "this version of Alchemist has no sparse matrices for libraries in C");
    return NULL;
}

/* A copy of this rank's part on its GPU, column-major like `data`, until the call returns. Do not
 * write to it: copy results to the `data` of their matrix, which MPI and clients use. NULL if there
 * is no GPU or no room on it (the host has recorded the cause: return ALCHEMIST_FAILED); also of a
 * part without elements. */
ALCHEMIST_API const void *alchemist_device_pointer(alchemist_call *call,
                                                   const alchemist_matrix *matrix) {
    if (call->host->abi >= 6) return call->host->device_pointer(call, matrix);
    alchemist_fail(call, "this version of Alchemist has no GPUs for libraries in C");
    return NULL;
}

ALCHEMIST_API int64_t alchemist_start(const alchemist_sparse *matrix, int64_t local_row) {
    return matrix->index == ALCHEMIST_INT32 ? ((const int32_t *)matrix->starts)[local_row]
                                            : ((const int64_t *)matrix->starts)[local_row];
}

ALCHEMIST_API int64_t alchemist_column(const alchemist_sparse *matrix, int64_t element) {
    return matrix->index == ALCHEMIST_INT32 ? ((const int32_t *)matrix->columns)[element]
                                            : ((const int64_t *)matrix->columns)[element];
}

/* Of a matrix of alchemist_new_sparse. */
ALCHEMIST_API void alchemist_set_start(const alchemist_sparse *matrix, int64_t local_row,
                                       int64_t start) {
    if (matrix->index == ALCHEMIST_INT32) ((int32_t *)matrix->starts)[local_row] = (int32_t)start;
    else ((int64_t *)matrix->starts)[local_row] = start;
}

ALCHEMIST_API void alchemist_set_column(const alchemist_sparse *matrix, int64_t element,
                                        int64_t column) {
    if (matrix->index == ALCHEMIST_INT32) ((int32_t *)matrix->columns)[element] = (int32_t)column;
    else ((int64_t *)matrix->columns)[element] = column;
}

ALCHEMIST_API int64_t alchemist_global_row(const alchemist_matrix *matrix, int64_t local_row) {
    if (matrix->row_block == 1) return matrix->row_shift + local_row * matrix->row_stride;
    return matrix->row_shift + local_row / matrix->row_block * matrix->row_stride +
           local_row % matrix->row_block;
}

ALCHEMIST_API int64_t alchemist_global_col(const alchemist_matrix *matrix, int64_t local_col) {
    if (matrix->col_block == 1) return matrix->col_shift + local_col * matrix->col_stride;
    return matrix->col_shift + local_col / matrix->col_block * matrix->col_stride +
           local_col % matrix->col_block;
}

/* ScaLAPACK's descriptor of a matrix in MC_MR, BLOCK or BLOCK_CYCLIC; data is the local array. The
 * grid of `context` has the gang's shape and ranks, column by column: Cblacs_gridinit(&context, "C",
 * call->grid_height, call->grid_width). Returns ALCHEMIST_OK; ALCHEMIST_FAILED for other layouts and
 * for sizes above 32 bits: convert with alchemist_to_layout first. */
ALCHEMIST_API int alchemist_descriptor(const alchemist_matrix *matrix, int context,
                                       int descriptor[9]) {
    const int64_t most = 0x7fffffff;
    if ((matrix->layout & 0xff) != ALCHEMIST_MC_MR || matrix->rows > most || matrix->cols > most)
        return ALCHEMIST_FAILED;
    /* A rank without columns has local_rows, and a leading dimension of 1. */
    const int64_t leading = matrix->local_rows > 1 ? matrix->local_rows : 1;
    const int64_t values[9] = {1, context, matrix->rows, matrix->cols, matrix->row_block,
                               matrix->col_block, 0, 0, leading};
    for (int i = 0; i < 9; i++) descriptor[i] = (int)values[i];
    return ALCHEMIST_OK;
}

/* --- other gangs --- */

/* Send a copy of a matrix through a channel that alchemist_ray.couple has made, to a call that runs
 * in another gang, or receive the next one into a matrix of the same shape and dtype; layouts and
 * numbers of ranks may differ. Collective. The first call for a channel waits for the other side; a
 * send waits if its last fields were not taken. Return what these return if it is not 0. */
#define ALCHEMIST_NEEDS_CHANNELS(CALL) \
    if ((CALL)->host->abi < 7) return alchemist_fail(CALL, "this version of Alchemist has no channels")
ALCHEMIST_API int alchemist_channel_send(alchemist_call *call, const char *name,
                                         const alchemist_matrix *matrix) {
    ALCHEMIST_NEEDS_CHANNELS(call);
    return call->host->channel_send(call, name, matrix);
}
ALCHEMIST_API int alchemist_channel_receive(alchemist_call *call, const char *name,
                                            const alchemist_matrix *out) {
    ALCHEMIST_NEEDS_CHANNELS(call);
    return call->host->channel_receive(call, name, out);
}

/* Let programs look at a matrix as it is now, with als.watch(name). Collective; it never waits. */
ALCHEMIST_API int alchemist_show(alchemist_call *call, const char *name,
                                 const alchemist_matrix *matrix) {
    ALCHEMIST_NEEDS_CHANNELS(call);
    return call->host->show(call, name, matrix);
}

/* --- waiting --- */

/* MPI's own calls return an error when the call has failed on another rank or was cancelled, and so
 * does every later one of this call: return ALCHEMIST_FAILED then. Receives under way are cancelled.
 * MPI still owns the buffers of nonblocking collectives: use static or call->state memory for them.
 * The functions below return ALCHEMIST_ENDED in this case. */
ALCHEMIST_API int alchemist_returned(alchemist_call *call, int code, const char *what) {
    if (code == MPI_SUCCESS) return ALCHEMIST_OK;
    return alchemist_check(call) ? ALCHEMIST_ENDED : alchemist_fail(call, "%s failed", what);
}

ALCHEMIST_API int alchemist_wait(alchemist_call *call, MPI_Request *request) {
    return alchemist_returned(call, MPI_Wait(request, MPI_STATUS_IGNORE), "MPI_Wait");
}

/* MPI_Allreduce over call->comm; in and out may be equal. */
ALCHEMIST_API int alchemist_allreduce(alchemist_call *call, const void *in, void *out, int count,
                                      MPI_Datatype type, MPI_Op op) {
    const void *from = in == out ? MPI_IN_PLACE : in;
    return alchemist_returned(call, MPI_Allreduce(from, out, count, type, op, call->comm),
                              "MPI_Allreduce");
}

/* Sends `count` elements to rank `to` and receives as many from rank `from`, for the edges of a
 * stencil's blocks. A rank outside of 0 to size - 1 is no neighbour: nothing is sent to it, and `in`
 * stays as it is. */
ALCHEMIST_API int alchemist_exchange(alchemist_call *call, const void *out, int to, void *in,
                                     int from, int count, MPI_Datatype type) {
    if (to < 0 || to >= call->size) to = MPI_PROC_NULL;
    if (from < 0 || from >= call->size) from = MPI_PROC_NULL;
    int code = in == out ? MPI_Sendrecv_replace(in, count, type, to, 0, from, 0, call->comm,
                                                MPI_STATUS_IGNORE)
                         : MPI_Sendrecv(out, count, type, to, 0, in, count, type, from, 0,
                                        call->comm, MPI_STATUS_IGNORE);
    return alchemist_returned(call, code, "MPI_Sendrecv");
}

#ifdef __cplusplus
}
#endif
#endif
