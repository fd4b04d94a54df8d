/* The C interface of the native engine. Python (gsa/ops/native) is its only caller: it checks every tensor and passes
   raw pointers. Functions return 0, or a code that Python turns into an error. */
#pragma once

#include <stdint.h>

#define GSA_API __attribute__((visibility("default")))
/* Raised whenever a function of this file changes its arguments or its meaning; Python refuses a library of another
   number. Structures and constants are compared one by one, see gsa_layout. */
#define GSA_ABI 12

#ifdef __cplusplus
extern "C" {
#endif

GSA_API int gsa_abi(void);
/* Numbers that Python has to agree with: the size of every structure of this file ("GsaTensor"), the offset of every
   field ("GsaTensor.batch") and every constant ("CHUNK", "FLOAT32"). The last has no name. */
typedef struct {
    const char* name;
    int64_t value;
} GsaNumber;

GSA_API const GsaNumber* gsa_layout(void);

/* Instruction sets, best first: names separated by spaces. */
GSA_API const char* gsa_isas(void);
/* The one in use, and another to use instead; 0 if this machine has it. */
GSA_API const char* gsa_isa(void);
GSA_API int gsa_use_isa(const char* name);

/* Entry points of the OpenMP library that torch uses, and whether it is GNU's; all null: threads of our own. */
GSA_API void gsa_use_openmp(void* gomp_parallel, void* omp_get_thread_num, void* omp_get_num_threads, int gnu);
/* Watches from now on whether other processes want the cores too; calls with several threads do so by themselves. */
GSA_API void gsa_watch_crowd(int threads);
/* Whether other processes want the cores (1) or not (0). gsa_assume_crowd sets the answer to 0 or 1; -1 returns to what
   is observed. */
GSA_API int gsa_crowded(void);
GSA_API void gsa_assume_crowd(int crowd);
/* What is believed after each of `count` windows of 50 ms in which threads waited such shares of the time for a core.
 */
GSA_API void gsa_believe(const double* shares, int count, int* crowded);
/* Calls use as many of their threads as their work is worth, or, after 1, all of them; for tests. */
GSA_API void gsa_use_every_thread(int yes);
/* How many threads the last call on this thread wanted. */
GSA_API int gsa_threads_asked(void);

/* The operator. Letters: B rows of the batch, T time, N sequences, H heads of keys and values, R query heads of each of
   them, HQ = H * R, K and V widths of keys and values, M slots. */

/* What its functions return. BAD_GATES: a log gate is above 0, or NaN. */
enum { GSA_STATUS_DONE, GSA_STATUS_NO_MEMORY, GSA_STATUS_BAD_GATES };
enum { GSA_FLOAT32, GSA_FLOAT64, GSA_BFLOAT16, GSA_FLOAT16 };
enum { GSA_READOUT_SOFTMAX, GSA_READOUT_IDENTITY, GSA_READOUT_SWISH, GSA_READOUT_RELU, GSA_READOUT_RELU2 };

/* A tensor [B, T, heads, width] whose last dimension is contiguous; strides in elements. data = null: not there. */
typedef struct {
    void* data;
    int64_t batch, time, head; /* strides */
    int32_t type;              /* GSA_FLOAT32 ... */
    int32_t width;
} GsaTensor;

/* States are dense and of the type sums are carried in: double if `wide`, otherwise float. */
typedef struct {
    int64_t sequences;                    /* N */
    const int64_t *rows, *starts, *stops; /* [N]: of each sequence its row of the batch, first token, end */
    int32_t heads;                        /* H, of keys and values */
    int32_t queries;                      /* R, query heads per key/value head */
    int32_t mark_chunks;                  /* states are kept for the backward pass at every so many chunks */
    int32_t threads;
    int32_t wide;
    double scale;
} GsaShape;

/* Gated linear attention. Gates: gk of width K or 1, gv of width V. Of the gradients, those of absent inputs are not
   there either. kept is filled by forward and read by backward; the marks of sequence n begin at
   the sum of those before it. */
typedef struct {
    GsaShape shape;
    GsaTensor q, k, v, gk, gv, o; /* heads: q and o HQ, the others H */
    const void* initial;          /* [N, H, K, V] or null */
    void* final;                  /* [N, H, K, V] */
    void* kept;                   /* [marks, H, K, V] or null */
    /* backward */
    GsaTensor d_o, dq, dk, dv, dgk, dgv;
    const void* dfinal; /* [N, H, K, V] or null */
    void* dinitial;     /* [N, H, K, V] */
} GsaLinearAttention;

/* Gated slot attention. s absent: 1 - exp(g). slots [B, T, HQ, M]: scores of the first pass, kept for backward. */
typedef struct {
    GsaShape shape;
    int32_t readout;
    GsaTensor q, k, v, g, s, o, slots;
    const void *initial_k, *initial_v; /* [N, H, K, M], [N, H, M, V], or both null */
    void *final_k, *final_v;           /* [N, H, K, M], [N, H, M, V] */
    void *kept_k, *kept_v;             /* [marks, H, K, M], [marks, H, M, V], or both null */
    /* backward */
    GsaTensor d_o, dq, dk, dv, dg, ds;
    const void *dfinal_k, *dfinal_v; /* [N, H, K, M], [N, H, M, V]; each may be null */
    void *dinitial_k, *dinitial_v;   /* [N, H, K, M], [N, H, M, V] */
} GsaSlotAttention;

/* Softmax attention in a sliding window: a token sees the last `window` tokens, itself among them, and of the first
   `sinks` tokens those that have left its window. The token at t of sequence n is the key at t + shifts[n] of the same
   row, the first key of the sequence that is there lies at firsts[n], and befores[n] of its tokens came before this
   call. Sinks have keys and values of their own, which sink_q asks. mark_chunks is not used. Gradients of keys that no
   query sees, and those of sinks in sequences without tokens, are not written. */
typedef struct {
    GsaShape shape;
    int64_t window;
    const int64_t *shifts, *firsts, *befores; /* [N] */
    int32_t sinks;                            /* S, may be 0 */
    GsaTensor q, k, v, o;                     /* heads: q and o HQ, the others H */
    GsaTensor sink_q, sink_k, sink_v;         /* [B, T, HQ, K], [N, S, H, K], [N, S, H, V] */
    GsaTensor lse;                            /* [B, T, HQ, 1], of the type sums are carried in */
    /* backward */
    GsaTensor d_o, d_lse, dq, dk, dv, dsink_q, dsink_k, dsink_v; /* d_lse may be absent */
} GsaWindowAttention;

/* Gated slot attention in one softmax with what else a token sees: `near` with the log-sum-exp near_lse. Slots know how
   many tokens they stand for, their mass; see joined_slots.h, where slot_scale is t, slot_mass c and slot_bias b. The
   gradients of these are added to what is there, for each sequence by itself. */
typedef struct {
    GsaShape shape;
    GsaTensor q, k, v, g, s, o, slots;              /* as of GsaSlotAttention */
    GsaTensor near, near_lse;                       /* [B, T, HQ, V]; [B, T, HQ, 1], of the type sums are carried in */
    const void *slot_scale, *slot_mass, *slot_bias; /* [HQ], of the type sums are carried in */
    const void *initial_k, *initial_v, *initial_mass; /* [N, H, K, M], [N, H, M, V], [N, H, M]; or all null */
    void *final_k, *final_v, *final_mass;
    void *kept_k, *kept_v, *kept_mass; /* [marks, H, ..]; or all null */
    /* backward */
    GsaTensor d_o, dq, dk, dv, dg, ds, d_near, d_near_lse;
    void *dslot_scale, *dslot_mass, *dslot_bias;   /* [N, HQ] */
    const void *dfinal_k, *dfinal_v, *dfinal_mass; /* each may be null */
    void *dinitial_k, *dinitial_v, *dinitial_mass;
} GsaJoinedSlots;

/* One token per row. States are dense; `after` may be the same memory as `before`. */
typedef struct {
    int64_t batch;
    const int64_t* state_of; /* [batch]: row b has state number state_of[b]; null: state number b */
    int32_t heads, queries, readout, threads, wide;
    int32_t check; /* whether bad gates are refused, before anything is written */
    double scale;
    GsaTensor q, k, v, g, s, o;      /* time is not used */
    const void *before_k, *before_v; /* [states, H, K, M], [states, H, M, V] */
    void *after_k, *after_v;         /* [states, H, K, M], [states, H, M, V] */
} GsaStep;

/* All return a GSA_STATUS. Forward computes with bad gates as with others, and says so at its end; backward does not
   mention them. */
GSA_API int gsa_linear_attention(const GsaLinearAttention* call, int backward);
GSA_API int gsa_slot_attention(const GsaSlotAttention* call, int backward);
GSA_API int gsa_slot_attention_step(const GsaStep* call);
GSA_API int gsa_window_attention(const GsaWindowAttention* call, int backward);
GSA_API int gsa_joined_slots(const GsaJoinedSlots* call, int backward);

/* Mamba's selective scan, with E channels of S states each. In the shape, heads and queries are one, mark_chunks and
   scale not used. kept is filled by forward and read by backward, with a mark for every 64 tokens of a sequence. */
typedef struct {
    GsaShape shape;
    GsaTensor u, dt, A, B, C, y; /* u, dt, y [B, T, 1, E], A [1, 1, E, S], B, C [B, T, 1, S] */
    const void* initial;         /* [N, E, S] or null */
    void* final;                 /* [N, E, S] */
    void* kept;                  /* [marks, S, E padded to 16] or null */
    /* backward */
    GsaTensor d_y, du, d_dt, dA, dB, dC;
    const void* dfinal; /* [N, E, S] or null */
    void* dinitial;     /* [N, E, S] */
} GsaSelectiveScan;

/* Returns a GSA_STATUS. Bad gates are here rates A above 0, lengths dt below it, and NaN; backward does not mention
   them. */
GSA_API int gsa_selective_scan(const GsaSelectiveScan* call, int backward);

/* Functions of the rows of matrices [rows, width], in one pass over memory; computed in float, or in double if `wide`.
     RMS_NORM   out = x / sqrt(mean(x^2) + epsilon) * weight
     SWIGLU     out = swish(x) * y
     SKIP_GATE  out = (x + weight * y) * swish(z)
     SOFTPLUS   out = log(1 + exp(x)) */
enum { GSA_ROWS_RMS_NORM, GSA_ROWS_SWIGLU, GSA_ROWS_SKIP_GATE, GSA_ROWS_SOFTPLUS };

typedef struct {
    int64_t rows;
    int32_t function; /* GSA_ROWS_... */
    int32_t width, threads, wide;
    double epsilon;
    GsaTensor x, y, z, out; /* [1, rows, 1, width] */
    const void* weight;     /* [width], of the type that is computed in */
    /* backward: all else is computed again */
    GsaTensor d_out, dx, dy, dz; /* [1, rows, 1, width] */
    void* dweight;               /* [width], of the type that is computed in */
} GsaRows;

/* Returns a GSA_STATUS. */
GSA_API int gsa_rows(const GsaRows* call, int backward);

/* Cross-entropy of logits [rows, V] against labels [rows], in float, or in double if `wide`. A label below 0 does not
   count: its loss is 0. With `gradient`, the logits become the gradient of the sum of all losses. */
typedef struct {
    int64_t rows;
    int32_t threads, wide, gradient;
    GsaTensor logits; /* [1, rows, 1, V] */
    const int64_t* labels;
    void* losses; /* [rows], of the type that is computed in */
} GsaCrossEntropy;

/* Returns a GSA_STATUS. */
GSA_API int gsa_cross_entropy(const GsaCrossEntropy* call);

/* The next token of a sequence: its scores, how it is chosen (gsa.sampling tells what the settings mean), and the
   number from 0 to 1 that chance has given. */
typedef struct {
    const float* logits;                      /* [V], finite */
    double temperature, top_p, min_p, chance; /* a temperature of 0 takes the likeliest */
    double repetition, presence, frequency;   /* penalties of the tokens that are known */
    int64_t top_k;                            /* 0 for all */
    int64_t known;                            /* tokens, each once ... */
    const int64_t* known_ids;
    const double* counts; /* ... and how often each has come out */
    int64_t biased;
    const int64_t* biased_ids;
    const double* biases;
    int64_t token; /* what comes out */
} GsaDraw;

/* Draws the tokens of several sequences over a vocabulary of `width`. Returns a GSA_STATUS. */
GSA_API int gsa_draw(GsaDraw* const* draws, int64_t count, int64_t width, int threads);

/* A causal convolution over time, each of C channels by itself: y_t = f(bias + sum_j weight_j x_{t-taps+1+j}). In the
   shape, heads and queries are one, mark_chunks and scale not used. What does not come from outside is computed again
   in the backward pass. */
typedef struct {
    GsaShape shape;
    int32_t taps, function;    /* function: GSA_FUNCTION_NONE or GSA_FUNCTION_SWISH */
    GsaTensor x, y;            /* [B, T, 1, C] */
    const void *weight, *bias; /* [taps, C], [C] or null */
    const void* past;          /* [N, taps - 1, C]: what came before each sequence; null: zeros */
    /* backward */
    GsaTensor d_y, dx;
    void *dweight, *dbias; /* [taps, C], [C] */
    void* dpast;           /* [N, taps - 1, C]; of sequences without tokens it is not written */
} GsaConvolution;

/* Returns a GSA_STATUS. */
GSA_API int gsa_convolution(const GsaConvolution* call, int backward);

/* Matrix-vector products, y [count, N] = W x (+ residual), for 1 to GSA_MAX_COLUMNS columns of activations in fp32. */
#define GSA_MAX_COLUMNS 16

/* The first two lie row by row; see linear.h for the others. */
enum { GSA_WEIGHT_FP32, GSA_WEIGHT_BF16, GSA_WEIGHT_INT8, GSA_WEIGHT_INT4 };

/* W [N, K]. */
typedef struct {
    int64_t format, N, K;
    int64_t group;                     /* columns that share a scale and a zero, a multiple of 32; 0: all */
    const void *weight, *scale, *zero; /* see Matrix in linear.h; dense formats have no scale and no zero */
} GsaMatrix;

/* What becomes of x [count, K] first: nothing; RMSNorm with `norm` [K] and `epsilon`; or silu(x[:K]) * x[K:], of x
   [count, 2K]. */
enum { GSA_INPUT_PLAIN, GSA_INPUT_RMS_NORM, GSA_INPUT_SWIGLU };
/* int8 for quantised weights only. Portable: without an instruction that not all machines have; the same integers. */
enum { GSA_ACTIVATIONS_FP32, GSA_ACTIVATIONS_INT8, GSA_ACTIVATIONS_INT8_PORTABLE };

/* residual [count, N] may be null, or y. Returns 0, or 1 if there is no memory. */
GSA_API int gsa_matvec(const GsaMatrix* matrix, int input, const float* x, const float* norm, float epsilon, int count,
                       int activations, const float* residual, float* y, int threads);
/* Products with many columns, y [count, N] = W x (+ residual), with x rounded to bf16, as W is, or to int8, for weights
   in int8 and int4; sums are fp32. Portable: without the processor's unit for such products; the same bits. */
enum { GSA_COMPUTE_BF16, GSA_COMPUTE_INT8, GSA_COMPUTE_BF16_PORTABLE, GSA_COMPUTE_INT8_PORTABLE };

/* Whether there is a unit for products in GSA_COMPUTE_BF16 or GSA_COMPUTE_INT8 that this instruction set uses. */
GSA_API int gsa_has_unit(int compute);
/* Keeps that unit busy on all threads for so many rounds each, with numbers that lie in registers; how many
   multiplications that were. */
GSA_API int64_t gsa_exercise(int compute, int64_t rounds, int threads);
/* Several matrices of the same K (in int8 also of one group) may have the same columns: N is then all of their rows,
   one matrix after the other. residual may be null, or y. Returns 0, or 1 if there is no memory. */
GSA_API int gsa_matmul(const GsaMatrix* const* matrices, int64_t number, int input, const float* x, const float* norm,
                       float epsilon, int64_t count, int compute, const float* residual, float* y, int threads);
/* Every product once, one after the other, W x of the same x (as long as the longest row needs) to the same y: what the
   kernels take for all weights of a model. Returns 0, or 1 if there is no memory. */
GSA_API int gsa_products(const GsaMatrix* const* matrices, int64_t count, const float* x, int activations, float* y,
                         int threads);
/* W as floats, row by row. */
GSA_API void gsa_unpack(const GsaMatrix* matrix, float* out, int threads);
/* Reads all bytes of all parts and does nothing else: the exclusive or of its words. */
GSA_API uint64_t gsa_read(const void* const* parts, const int64_t* bytes, int64_t count, int threads);

/* Decoding: a token for each of a few sequences, through all layers of a model.

   What lies between the products of a layer are its features: a row of numbers for each token, in which every part of
   the layer has a place, which is where its numbers begin. A place of -1 is none. What is marked with a 16 below is
   padded to a multiple of 16 numbers, and so is the room for each product's results; of what is beyond a width nothing
   is used. Memories, marked with B, lie in blocks of GSA_MEMORY_BLOCK columns one after another, the last of which may
   be narrower: [n, 40 B] is [n, 32] followed by [n, 16].

   Letters as above; D is the width of the model, E and S the channels of a scan and the states of each. */

enum {
    GSA_FUNCTION_NONE,
    GSA_FUNCTION_SWISH,
    GSA_FUNCTION_RELU,
    GSA_FUNCTION_RELU2,
    GSA_FUNCTION_GELU,
    GSA_FUNCTION_SIGMOID,
    GSA_FUNCTION_ELU1,
    GSA_FUNCTION_SOFTPLUS
};
enum { GSA_GATE_NONE, GSA_GATE_FORGET, GSA_GATE_WRITE };
enum { GSA_MEMORY_SLOTS, GSA_MEMORY_LINEAR, GSA_MEMORY_SCAN, GSA_MEMORY_CACHE, GSA_MEMORY_HYBRID };
enum { GSA_NORM_NONE, GSA_NORM_FULL, GSA_NORM_HEADS };
enum { GSA_ROUTER_NONE, GSA_ROUTER_SIGMOID, GSA_ROUTER_SOFTMAX };

#define GSA_MEMORY_BLOCK 32

/* A causal convolution over the last `size` tokens, of the first `channels` C of a product's results, each by itself;
   then a function. size = 0: none. */
typedef struct {
    const float *weight, *bias; /* [size, C16], the token itself last; [C16] or null */
    float* past;                /* [states, size - 1, C16], the newest last; changed in place */
    int64_t channels;
    int32_t size, function;
} GsaStepConvolution;

/* What becomes of logits x [N]. FORGET: a = sigmoid(x)^(1 / temperature), or with bounds b + (1 - b) of that, takes
   their place, and 1 - a goes to the place `write`. WRITE, of ABC: with z the sum of exp(x) over time, x between
   -clamp and clamp (0: no limits), the share exp(x) / z goes to `write`, and what z was over z takes their place; 1
   instead of that without `normalise`. */
typedef struct {
    const float *log_bound, *log_rest; /* [N16], of b and 1 - b; or null */
    double* log_z;                     /* [states, N16], changed in place */
    double temperature, clamp;
    int64_t write;
    int32_t kind, normalise;
} GsaGate;

/* W x + bias, and what is done to its results one by one: the convolution, a function, a gate. */
typedef struct {
    GsaMatrix matrix;      /* [N, K] */
    const float* bias;     /* [N] or null */
    int64_t input, output; /* places; without an input: the normed x of the layer */
    GsaStepConvolution convolution;
    GsaGate gate;
    int32_t function;
} GsaProduct;

/* Queries, keys and values, and what is done to each head of the first two: a matrix and relu; RMSNorm; a turn by its
   position. `queries` are the heads of them per key/value head. */
typedef struct {
    int64_t q, k, v, o;                 /* places of [HQ, K], [H, K], [H, V], [HQ, V] */
    const float* map;                   /* [K, K16], a row for each input; or null */
    const float *query_norm, *key_norm; /* [K] or null */
    const double* frequencies;          /* [K / 2] or null */
    int64_t* positions;                 /* [states]: tokens so far; or null */
    double scale;
    float epsilon;
    int32_t heads, queries, key_width, value_width;
} GsaHeads;

/* Which slots take a token: those with the `chosen` largest logits of their head, and with as much as the last of them.
   They have weights w, which are softmax(logits), or sigmoid(logits) divided by its sum over them; others have 0. Then
   a = exp(w g) goes to the memory's place `decay`, and 1 - a to `write`. */
typedef struct {
    int64_t logits, gates; /* places of [H, M]; of [H, M], with g = log sigmoid(gates) / temperature, or with rates of
                              [H], with g = -rate * gates */
    const float* rates;    /* [H] or null */
    double temperature;
    int32_t kind, chosen;
} GsaRouter;

/* SLOTS and LINEAR. Gates are features, or the same for all tokens. They are [H, M] of slots, and of linear attention
   [H, K] with nothing to write. `own`: every query head has a memory of its own, and H is HQ here. */
typedef struct {
    int64_t decay, write;                         /* places */
    const float *constant_decay, *constant_write; /* or null */
    float *keys, *values;                         /* slots: [states, H, K, M B], [states, H, M, V B]; linear:
                                                     values [states, H, K, V B]; changed in place */
    GsaRouter router;                             /* of slots */
    int32_t slots, readout, own;
} GsaMemory;

/* CACHE: keys and values of earlier tokens. The token at position p lies in slot p mod capacity of its sequence: keys
   [H, capacity / 16, K, 16], then values [H, capacity, V16]. Capacities are multiples of GSA_CACHE_BLOCK, and no call
   may bring more tokens than there is room for beside those that are still seen. */
#define GSA_CACHE_BLOCK 128
typedef struct {
    float* const* caches;               /* [states] */
    const int64_t *capacities, *begins; /* [states]; begins: the first position that is there */
    int64_t window;                     /* tokens that a token sees, itself among them; 0: all */
} GsaCache;

/* HYBRID: the window of a cache beside sinks and slots, in one softmax. The first tokens are kept as sinks. Every other
   token is written to the slots when it leaves the window: the cache still holds it then. Of the memory, gates are [H,
   M16], and keys and values [states, H, K, M B] and [states, H, M, K B] are sums that are still to be divided by
   `mass`. V is K. */
#define GSA_EMPTY 1e-15f /* a slot that stands for no more tokens is empty: quotients by `mass` stay finite */

typedef struct {
    int64_t sink_query, slot_query; /* places of [HQ, K]: what sinks and slots are asked by */
    int64_t left;                   /* place of [H, 2 K]: key and value of the token that leaves the window */
    int64_t inverse, log_mass;      /* places of [H, M16]: what averages are multiplied with, and log of `mass` */
    const void *router_weight, *query_weight; /* [H, 2 K, M16]; [HQ, K, K16]: slots are asked by q + q U */
    const float* router_bias;                 /* [H, M16]; beyond M, one with which a slot takes nothing */
    const float *rates, *fades; /* [H, M16]: slots share a token by a softmax, and forget rate x share + fade of what
                                   they have; or null: by gates */
    const float *scale, *mass_power, *bias; /* [HQ]: a slot's score is scale * q . k + mass_power * log_mass + bias */
    float *sink_keys, *sink_values;         /* [states, H, S16 / 16, K, 16], [states, H, S16, K16]; changed in place */
    float* mass;                            /* [states, H, M16], changed in place */
    double temperature, least;              /* of gates, as in GsaGate; a share that is not more than `least` is none */
    int32_t sinks;                          /* S */
    int32_t bf16;                           /* whether the two weights are in bf16, or in fp32 */
    int32_t own_positions;                  /* whether slots hold keys as they were turned, or not turned at all */
} GsaHybrid;

/* SCAN: h = exp(dt A) h + dt u B, then (h C + u skip) * gate to y; behind the layer's last product, which makes dt. */
typedef struct {
    int64_t u, dt, B, C, gate, y; /* places of [E], [E], [S], [S], [E], [E] */
    const float *A, *skip;        /* [S, E B], [E16] */
    float* memory;                /* [states, S, E B], changed in place */
    int32_t channels, states;
} GsaScan;

/* x + W (norm of function of o, times its gate). */
typedef struct {
    GsaMatrix matrix;  /* [D, width] */
    int64_t o, gate;   /* places of [width] */
    const float* norm; /* [width], or [V] for each head */
    float epsilon;
    int32_t norm_kind, function;
} GsaOutput;

/* x + down (swish(gate) * up) of the normed x; without weights: nothing. */
typedef struct {
    GsaMatrix gate, up, down;
    const float* norm;
    float epsilon;
} GsaMlp;

typedef struct {
    const float* norm;          /* [D] */
    const GsaProduct* products; /* [product_count]; those that follow each other with the same input go together */
    int64_t product_count;
    int64_t features; /* numbers of a row */
    GsaHeads heads;
    GsaMemory memory;
    GsaCache cache;
    GsaHybrid hybrid;
    GsaScan scan;
    GsaOutput output;
    GsaMlp mlp;
    float epsilon;
    int32_t kind; /* GSA_MEMORY_... */
} GsaBlock;

typedef struct {
    int64_t width; /* D */
    int64_t block_count;
    const GsaBlock* blocks;     /* [block_count] */
    GsaMatrix embeddings, head; /* [vocabulary, D] */
    const float* norm;          /* [D] */
    float epsilon;
    int32_t activations; /* GSA_ACTIVATIONS_... */
} GsaDecoder;

/* The most tokens in a call of decoding: weights are read once for all of them. */
#define GSA_MAX_TOKENS 64

/* Tokens ids [count], 1 to GSA_MAX_TOKENS of them; token i belongs to the sequence with state number state_of[i].
   Tokens of one sequence stand together, in their order. Logits [count - first, vocabulary] of the tokens from `first`
   on, which may be none. Returns 0, or 1 if there is no memory. */
GSA_API int gsa_decode(const GsaDecoder* decoder, const int64_t* ids, const int64_t* state_of, int count, int first,
                       float* logits, int threads);

#ifdef __cplusplus
}
#endif
