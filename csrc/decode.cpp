// One token of a few sequences through all blocks of a model, by one team of threads that stays together from the
// embedding to the head.
#include "decode.h"

#include "decode_layer.h"
#include "parallel.h"

namespace gsa {
namespace GSA_ISA {
namespace {

struct Decode {
    const DecodeCall& call;
    Stream stream;
    Columns shared{};         // room for all columns
    Columns* own = nullptr;   // [threads], room for one column each
    float** space = nullptr;  // [threads], working memory of layers
    Barrier barrier;

    Decode(const DecodeCall& call, int threads, Arena& arena) : call(call), stream(arena, call) {
        const GsaDecoder& decoder = call.decoder;
        ColumnRoom room;
        room.words_per_quad = words_per_quad(call.linear, decoder.activations);
        room.include(decoder.head);
        for (int64_t i = 0; i < decoder.block_count; i++) {
            const GsaBlock& block = decoder.blocks[i];
            for (int64_t j = 0; j < block.product_count; j++) room.include(block.products[j].matrix);
            const GsaMatrix* const others[] = {&block.output.matrix, &block.mlp.gate, &block.mlp.down};
            for (const GsaMatrix* matrix : others) room.include(*matrix);
        }
        shared = room.take(arena, call.count);
        own = arena.take<Columns>(threads);
        space = arena.take<float*>(threads);
        const int64_t numbers = most(call, Layer::space_of);
        for (int t = 0; t < threads; t++) {
            const Columns columns = room.take(arena, 1);
            float* floats = arena.take<float>(numbers);
            if (own == nullptr) continue;
            own[t] = columns;
            space[t] = floats;
        }
    }

    // Every sequence has read its tokens, in the layers that count them.
    void count_tokens() const {
        for (int64_t i = 0; i < call.decoder.block_count; i++) {
            int64_t* positions = call.decoder.blocks[i].heads.positions;
            for (int c = 0; positions != nullptr && c < call.count; c++) positions[call.state_of[c]]++;
        }
    }

    void run(int rank, int size) {
        const GsaDecoder& decoder = call.decoder;
        Worker worker{call.linear, {rank, size, &barrier, nullptr}, own[rank], shared};
        const Matrix embeddings = described(decoder.embeddings);
        for (int c = worker.team.begin(call.count); c < worker.team.end(call.count); c++)
            call.linear.unpack(embeddings, call.ids[c], stream.x + c * decoder.width);
        worker.team.wait();
        for (int64_t i = 0; i < decoder.block_count; i++) Layer(decoder.blocks[i], stream, worker, space[rank]).run();
        if (rank == 0) count_tokens();
        if (call.first == call.count) return;
        const auto last = [&](int c, float* out) {
            stream.normed(call.first + c, decoder.norm, decoder.epsilon, call.linear, out);
        };
        worker.multiply(worker.columns(decoder.head, call.count - call.first, last),
                        {{&decoder.head, call.logits, decoder.head.N, nullptr}});
    }
};

// Products alone.
struct Products {
    const ProductsCall& call;
    Columns* own = nullptr;
    Barrier barrier;

    Products(const ProductsCall& call, int threads, Arena& arena) : call(call) {
        ColumnRoom room;
        room.words_per_quad = words_per_quad(call.linear, call.activations);
        for (int64_t i = 0; i < call.count; i++) room.include(*call.matrices[i]);
        own = arena.take<Columns>(threads);
        for (int t = 0; t < threads; t++) {
            const Columns columns = room.take(arena, 1);
            if (own != nullptr) own[t] = columns;
        }
    }

    void run(int rank, int size) {
        Worker worker{call.linear, {rank, size, &barrier, nullptr}, own[rank], own[rank]};
        for (int64_t i = 0; i < call.count; i++) {
            const GsaMatrix& matrix = *call.matrices[i];
            const auto copy = [&](int, float* out) { __builtin_memcpy(out, call.x, sizeof(float) * matrix.K); };
            worker.multiply(worker.columns(matrix, 1, copy), {{&matrix, call.y, matrix.N, nullptr}});
        }
    }
};

template <class Task, class Call>
size_t size_of(const Call& call, int threads) {
    Arena arena;
    const Task task(call, threads, arena);
    return arena.used;
}

template <class Task, class Call>
void run(const Call& call, int threads, char* memory) {
    Arena arena{memory};
    Task task(call, threads, arena);
    as_team(threads, [](void* context, int rank, int size) { static_cast<Task*>(context)->run(rank, size); }, &task);
}

}  // namespace

extern const DecodeKernels decode_kernels;
const DecodeKernels decode_kernels = {size_of<Decode, DecodeCall>, run<Decode, DecodeCall>,
                                      size_of<Products, ProductsCall>, run<Products, ProductsCall>};

}  // namespace GSA_ISA
}  // namespace gsa
