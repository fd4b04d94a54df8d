// The next tokens of sequences, drawn from their scores; compiled once for each instruction set. A row of scores is
// worked on in the cache, in double precision, as src/gsa/infer/sampling.py does it with torch.
#include "draw.h"

#include "arena.h"
#include "elementary.h"
#include "parallel.h"

namespace gsa {
namespace GSA_ISA {
namespace {

constexpr int W = Simd<double>::W;
typedef Simd<double>::Int Int;
constexpr double kMost = 1.7976931348623157e308;
constexpr int64_t kBlock = 512;  // weights that have a sum of their own, so that a draw need not add up all
constexpr int64_t kGroup = 64;   // scores whose highest is looked at first, to find those that top-k leaves

int64_t blocks_of(int64_t width) { return (width + kBlock - 1) / kBlock; }

struct Entry {
    double value;
    int64_t id;

    // Of equals, the lower id comes first.
    bool before(const Entry& other) const { return value > other.value || (value == other.value && id < other.id); }
};

void swap(Entry& a, Entry& b) {
    const Entry kept = a;
    a = b;
    b = kept;
}

// The one in the middle of the first, the middle and the last.
Entry middle_of(const Entry* entries, int64_t begin, int64_t end) {
    Entry a = entries[begin], b = entries[(begin + end) / 2], c = entries[end - 1];
    if (b.before(a)) swap(a, b);
    if (c.before(b)) swap(b, c);
    return b.before(a) ? a : b;
}

// The last entry that is left, if the first ones are until their measures reach `needed`; one is at least. Takes time
// in proportion to the count, nearly always; entries change places.
template <class Measure>
Entry last_needed(Entry* entries, int64_t count, double needed, Measure measure) {
    int64_t begin = 0, end = count;
    double reached = 0;
    Entry last = entries[0];
    while (begin < end) {
        const Entry pivot = middle_of(entries, begin, end);
        int64_t earlier = begin, place = begin;
        double sum = 0;
        for (int64_t i = begin; i < end; i++) {
            if (!entries[i].before(pivot)) continue;
            sum += measure(entries[i]);
            swap(entries[earlier++], entries[i]);
        }
        for (place = earlier; entries[place].id != pivot.id; place++) {
        }
        swap(entries[earlier], entries[place]);
        if (earlier > begin && reached + sum >= needed) {
            end = earlier;
            continue;
        }
        last = pivot;
        reached += sum + measure(pivot);
        if (reached >= needed) break;
        begin = earlier + 1;
    }
    return last;
}

struct Row {
    const GsaDraw& call;
    int64_t width, blocks;
    double *scores, *weights, *sums;  // [blocks * kBlock] twice, and a sum for each block
    Entry* entries;                   // [width]

    Row(const GsaDraw& call, int64_t width, Arena& arena) : call(call), width(width), blocks(blocks_of(width)) {
        scores = arena.take<double>(static_cast<size_t>(blocks * kBlock));
        weights = arena.take<double>(static_cast<size_t>(blocks * kBlock));
        sums = arena.take<double>(static_cast<size_t>(blocks));
        entries = arena.take<Entry>(static_cast<size_t>(width));
    }

    int64_t token() {
        read_scores();
        const double most = highest();
        if (call.temperature == 0) return first(most);
        weigh(most);
        const bool some = call.top_p < 1;
        const Entry last = some ? nucleus() : Entry{0, width};
        if (some || call.min_p > 0) leave(last);
        return drawn();
    }

    static double limited(double x) { return x > kMost ? kMost : x < -kMost ? -kMost : x; }

    void read_scores() {
        for (int64_t i = 0; i < width; i++) scores[i] = call.logits[i];
        for (int64_t i = 0; i < call.known; i++) {
            double& score = scores[call.known_ids[i]];
            if (call.repetition != 1) score = limited(score < 0 ? score * call.repetition : score / call.repetition);
            const double count = call.counts[i];
            if (count > 0) score -= call.presence + call.frequency * count;
        }
        for (int64_t i = 0; i < call.biased; i++) scores[call.biased_ids[i]] += call.biases[i];
    }

    double highest() const {
        const int64_t whole = width / W * W;
        Vec<double> most = splat(scores[0]);
        for (int64_t i = 0; i < whole; i += W) most = larger<double>(load(scores + i), most);
        double found = most[0];
        for (int lane = 1; lane < W; lane++) found = most[lane] > found ? most[lane] : found;
        for (int64_t i = whole; i < width; i++) found = scores[i] > found ? scores[i] : found;
        return found;
    }

    int64_t first(double score) const {
        int64_t i = 0;
        while (scores[i] != score) i++;
        return i;
    }

    // Those of all scores that are at least so high, as entries; how many they are.
    int64_t entries_from(const double* values, double least) {
        int64_t count = 0;
        for (int64_t i = 0; i < blocks * kBlock; i += W) {
            const Int any = load(values + i) >= least;
            if (none<double>(any)) continue;
            for (int64_t j = i; j < i + W && j < width; j++)
                if (values[j] >= least) entries[count++] = {values[j], j};
        }
        return count;
    }

    // The lowest score that top-k leaves, that is, the k-th highest of all. Of the groups' highest scores k are at
    // least as high as the k-th highest of these, so that is a lower bound: what is below it is not looked at.
    double limit_of_top_k() {
        const auto one = [](const Entry&) { return 1.0; };
        const double needed = static_cast<double>(call.top_k);
        const int64_t groups = (width + kGroup - 1) / kGroup;
        double least = -kMost;
        if (call.top_k < groups) {
            for (int64_t group = 0; group < groups; group++) {
                const int64_t begin = group * kGroup, end = begin + kGroup < width ? begin + kGroup : width;
                double most = scores[begin];
                for (int64_t i = begin; i < end; i++) most = scores[i] > most ? scores[i] : most;
                entries[group] = {most, group};
            }
            least = last_needed(entries, groups, needed, one).value;
        }
        return last_needed(entries, entries_from(scores, least), needed, one).value;
    }

    // Weights in proportion to the probabilities, 1 the highest, of what top-k leaves; others are 0.
    void weigh(double most) {
        const double inverse = limited(1 / call.temperature);  // of a highest score, 0 * infinity would be NaN
        const bool few = call.top_k > 0 && call.top_k < width;
        const double limit = few ? limit_of_top_k() : -__builtin_inf();
        for (int64_t i = width; i < blocks * kBlock; i++) scores[i] = most;
        for (int64_t block = 0; block < blocks; block++) {
            Vec<double> total{};
            for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += W) {
                const Vec<double> score = load(scores + i);
                Vec<double> weight = exp<double>((score - most) * inverse);
                weight = score >= limit ? weight : Vec<double>{};
                if (i + W > width) weight = lane_numbers<double>() + i >= width ? Vec<double>{} : weight;
                store(weights + i, weight);
                total += weight;
            }
            sums[block] = sum<double>(total);
        }
    }

    double whole() const {
        double total = 0;
        for (int64_t block = 0; block < blocks; block++) total += sums[block];
        return total;
    }

    // The last of those that top-p leaves. What weighs so little that all such tokens together are beyond its share is
    // not looked at; half of that, so that rounding does not matter.
    Entry nucleus() {
        const double total = whole(), least = (1 - call.top_p) * total / static_cast<double>(width) / 2;
        return last_needed(entries, entries_from(weights, least), call.top_p * total,
                           [](const Entry& entry) { return entry.value; });
    }

    // Those up to the last one, of which min-p leaves those that weigh enough.
    void leave(const Entry& last) {
        const double least = last.value > call.min_p ? last.value : call.min_p;
        for (int64_t block = 0; block < blocks; block++) {
            Vec<double> total{};
            for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += W) {
                const Vec<double> weight = load(weights + i);
                const Int gone = (weight < least) | ((weight == last.value) & (lane_numbers<double>() + i > last.id));
                const Vec<double> left = gone ? Vec<double>{} : weight;
                store(weights + i, left);
                total += left;
            }
            sums[block] = sum<double>(total);
        }
    }

    // Where the sum of the weights, in the order of ids, passes `chance` of the whole; where rounding keeps it from
    // that, the last that weighs anything.
    int64_t drawn() const {
        const double target = call.chance * whole();
        double before = 0, reached = 0;
        int64_t last = 0;
        for (int64_t block = 0; block < blocks; block++) {
            if (sums[block] == 0) continue;
            last = block;
            before = reached;
            reached += sums[block];
            if (reached > target) break;
        }
        int64_t found = last * kBlock;
        for (int64_t i = last * kBlock; i < (last + 1) * kBlock; i++) {
            if (weights[i] == 0) continue;
            found = i;
            before += weights[i];
            if (before > target) break;
        }
        return found;
    }
};

size_t room(int64_t width) {
    Arena arena;
    const GsaDraw none{};
    Row row(none, width, arena);
    return arena.used;
}

struct Rows {
    GsaDraw* const* draws;
    int64_t count, width, next;
    size_t room;
    char* memory;

    static void thread(void* context, int rank, int) {
        Rows& rows = *static_cast<Rows*>(context);
        for (;;) {
            const int64_t i = __atomic_fetch_add(&rows.next, 1, __ATOMIC_RELAXED);
            if (i >= rows.count) return;
            Arena arena;
            arena.base = rows.memory + static_cast<size_t>(rank) * rows.room;
            rows.draws[i]->token = Row(*rows.draws[i], rows.width, arena).token();
        }
    }
};

void draw(GsaDraw* const* draws, int64_t count, int64_t width, int threads, char* memory) {
    Rows rows{draws, count, width, 0, room(width), memory};
    as_they_come(threads, Rows::thread, &rows);
}

}  // namespace

extern const DrawKernels draw_kernels;
const DrawKernels draw_kernels = {room, draw};

}  // namespace GSA_ISA
}  // namespace gsa
