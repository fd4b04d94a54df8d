// Gated slot attention on one chunk: slot weights are a function of the scores.
#pragma once

#include "slot_passes.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
struct SlotAttention : SlotPasses<T, SlotAttention<T>, GsaSlotAttention> {
    using SlotPasses<T, SlotAttention<T>, GsaSlotAttention>::SlotPasses;

    void weigh(const Team& team, const HeadChunk& chunk, const T*, T*) {
        const int rows = this->queries * chunk.tokens;
        const ptrdiff_t row = this->p.row;
        for (int i = team.begin(rows); i < team.end(rows); i++)
            read_out(this->call.readout, this->scores + i * row, this->call.g.width, this->M, this->p.raw + i * row);
    }

    void weigh_backward(const Team& team, const HeadChunk& chunk) {
        const int rows = this->queries * chunk.tokens;
        for (int i = team.begin(rows); i < team.end(rows); i++) {
            const ptrdiff_t row = i * this->p.row;
            read_out_backward(this->call.readout, this->scores + row, this->p.raw + row, this->dp + row, this->M,
                              this->dscores.raw + row);
        }
    }

    void finish_outputs(const Team&, const HeadChunk&, const Rows<T>&) {}
    void finish_gates(const Team&, const HeadChunk&, const T*, T*) {}
    void replay_more(const Team&, const HeadChunk&, const T*, T*) {}
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
