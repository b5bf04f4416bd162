// Sums over the unmasked positions of a task: see mask.h.
#pragma once

#include <memory>

#include "channel_sums.h"
#include "mask.h"

namespace syncbn::cpu {

// The fill values at masked positions of each tensor: one for each of the task's channels, or null
// for zeros. Their terms must be zero.
template <template <typename> class Formula, typename T>
using Fills = std::array<const T*, SummedTensors<Formula, T>::kInputs>;

// Memory for a chunk of each tensor.
template <template <typename> class Formula, typename T>
class ChunkMemory {
 public:
  static constexpr int kInputs = SummedTensors<Formula, T>::kInputs;

  explicit ChunkMemory(int64_t values)
      : values_(values), memory_(new T[(kInputs + Formula<T>::kStores) * values]) {}

  T* input(int i) { return &memory_[i * values_]; }
  T* output() { return Formula<T>::kStores ? input(kInputs) : nullptr; }
  SummedTensors<Formula, T> tensors() {
    SummedTensors<Formula, T> tensors{};
    for (int i = 0; i < kInputs; ++i) {
      tensors.inputs[i] = input(i);
    }
    tensors.output = output();
    return tensors;
  }

 private:
  int64_t values_;
  std::unique_ptr<T[]> memory_;
};

// Sums one channel of planes. `constants` points to the constants of the task's channel.
template <template <typename> class Formula, typename T>
void masked_planar_sums(const SummedTensors<Formula, T>& tensors, const uint8_t* mask,
                        const Fills<Formula, T>& fills, const Geometry& geometry, const Task& task,
                        const Formula<const compute_t<T>*>& constants, double* weights,
                        double* products) {
  ChunkMemory<Formula, T> memory(std::min(kChunkValues, task.length));
  const SummedTensors<Formula, T> chunk = memory.tensors();
  *weights = 0;
  *products = 0;
  for (int64_t done = 0; done < task.length; done += kChunkValues) {
    const int64_t begin = task.begin + done;
    const int64_t count = std::min(kChunkValues, task.length - done);
    for (int i = 0; i < memory.kInputs; ++i) {
      const T fill = fills[i] != nullptr ? *fills[i] : T{};
      dispatch_isa<SelectPlanes<T>>(tensors.inputs[i], mask, &geometry, task.channel, begin, count,
                                    fill, memory.input(i));
    }
    const Geometry of_chunk{1, 1, count};
    const Task all{0, 0, 1, 0, count};
    double weight;
    double product;
    dispatch_isa<PlanarSums<Formula, T>>(&chunk, &of_chunk, &all, &constants, &weight, &product);
    *weights += weight;
    *products += product;
    if constexpr (Formula<T>::kStores) {
      // The gradient of SiLU is NaN even at masked positions of a channel that is not finite.
      dispatch_isa<ClearPlanes<T>>(memory.output(), mask + begin, &of_chunk, int64_t{0}, count);
      const T* from = memory.output();
      for (Spans spans(geometry, task.channel, begin, count); spans.left > 0; spans.next()) {
        std::copy_n(from, spans.length(), tensors.output + spans.offset);
        from += spans.length();
      }
    }
  }
}

// Sums the channels of a task of rows. Constants are arrays over the task's channels.
template <template <typename> class Formula, typename T>
void masked_row_sums(const SummedTensors<Formula, T>& tensors, const uint8_t* mask,
                     const Fills<Formula, T>& fills, const Geometry& geometry, const Task& task,
                     const Formula<const compute_t<T>*>& constants, double* weights,
                     double* products) {
  const int64_t inner = geometry.inner;
  const int64_t stride = geometry.channels * inner;
  const int64_t width = task.channels * inner;
  const int64_t chunk_rows = std::min(round_up(ceil_div(kChunkValues, width), kGroup), task.length);
  ChunkMemory<Formula, T> memory(chunk_rows * width);
  const SummedTensors<Formula, T> chunk = memory.tensors();
  T fill_rows[SummedTensors<Formula, T>::kInputs][kMaxColumns] = {};
  for (int i = 0; i < memory.kInputs; ++i) {
    for (int64_t column = 0; fills[i] != nullptr && column < width; ++column) {
      fill_rows[i][column] = fills[i][column / inner];
    }
  }
  uint8_t lanes[kMaxColumns];
  double chunk_weights[kMaxColumns];
  double chunk_products[kMaxColumns];
  std::fill(weights, weights + task.channels, 0);
  std::fill(products, products + task.channels, 0);
  for (int64_t done = 0; done < task.length; done += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, task.length - done);
    const int64_t first_row = task.begin + done;
    const int64_t at = first_row * stride + task.channel * inner;
    const uint8_t* const of_rows = mask + first_row * inner;
    int64_t copied = 0;
    for (int i = 0; i < memory.kInputs; ++i) {
      dispatch_isa<SelectRows<T>>(tensors.inputs[i] + at, stride, width, inner, of_rows, rows,
                                  &fill_rows[i][0], &lanes[0], memory.input(i), &copied);
    }
    const Geometry of_chunk{copied, task.channels, inner};
    const Task all{0, 0, task.channels, 0, copied};
    if (copied > 0) {
      dispatch_isa<RowSums<Formula, T>>(&chunk, &of_chunk, &all, &constants, &chunk_weights[0],
                                        &chunk_products[0]);
      for (int64_t c = 0; c < task.channels; ++c) {
        weights[c] += chunk_weights[c];
        products[c] += chunk_products[c];
      }
    }
    if constexpr (Formula<T>::kStores) {
      if (inner > 1) {
        dispatch_isa<ClearRows<T>>(memory.output(), of_rows, &of_chunk, rows, &lanes[0]);
      }
      const T* from = memory.output();
      for (int64_t row = 0; row < rows; ++row) {
        T* const to = tensors.output + at + row * stride;
        if (inner == 1 && of_rows[row] == 0) {
          std::fill_n(to, width, T{});
        } else {
          std::copy_n(from, width, to);
          from += width;
        }
      }
    }
  }
}

}  // namespace syncbn::cpu
