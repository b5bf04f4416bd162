// Every operator's schema and contract. This file tells what the library computes; csrc/cpu and
// csrc/cuda implement it, one file for each operator, and register themselves.
//
// Common to all:
//   input        (N, C, ...) with at least 2 dimensions and C > 0; float16, bfloat16, float32 or
//                float64; contiguous or channels-last (channel fastest), anything else is an
//                error; N or any spatial size may be 0.
//   channel vectors (weight, bias, running_mean, running_var)
//                shape [C], any stride, in the input's dtype, float32 or float64.
//   mask         bool, the shape of input without its channels, contiguous; on CPUs alone. Places
//                where it is false count in no sum, whatever stands there; outputs, dz and
//                gradients are 0 there. None is true everywhere.
//   statistics   (message, totals, mean, invstd, count, sums) are contiguous float64.
//   fingerprint, next_size, fingerprint_sum
//                what ranks announce to each other, see syncbn/distributed/protocol.py. With a
//                fingerprint, a message has the length 2C+4 in both directions: 2C sums, the count
//                (backward 0), the fingerprint, the next_size and its square.
// All tensors are on one device. Nothing synchronizes with the host on CUDA. Results do not
// depend on the number of threads. None of the operators communicates or has an autograd formula:
// syncbn/functional.py joins them with the collectives. Errors are RuntimeError.

#include "common/stable.h"

STABLE_TORCH_LIBRARY(syncbn, m) {
  // This rank's part of the batch statistics, as a message that ranks can add up.
  //   message  [2C+1]: sum of x per channel, sum of x^2 per channel, number of values per channel;
  //            [2C+4] with a fingerprint.
  // The sums are derived from a mean and a sum of squared deviations that are computed first, so
  // that the message is as accurate as float64 can carry it. An empty input gives zeros.
  m.def(
      "batch_norm_stats(Tensor input, float? fingerprint=None, float next_size=0, "
      "Tensor? mask=None) -> Tensor message");

  // Normalizes by the statistics of the whole group, and updates the running statistics.
  //   totals   the message summed over all ranks.
  //   output   input's shape, dtype and layout: activation(z), with
  //            z = (x - mean) * invstd * weight + bias + residual;
  //            invstd = 1 / sqrt(biased variance + eps); no weight is 1, no bias is 0.
  //   residual shape, dtype and layout of input; none is 0.
  //   activation
  //            0: none, 1: ReLU, 2: leaky ReLU with negative_slope, 3: SiLU. Of the unrounded
  //            z, which is not positive where output's dtype would round it to 0.
  //   mean, invstd [C], count [1], constants [2C]: what backward needs. Where constants are given
  //            they are overwritten by scale and shift of each channel, with which z is computed:
  //            (x - center) * scale + shift, center being the mean rounded to the type that is
  //            computed in.
  // running_mean and running_var (both or neither) move by `momentum` toward the mean and the
  // unbiased variance; a momentum of None is the cumulative average, 1 / num_batches_tracked, and
  // needs num_batches_tracked. num_batches_tracked (int64, one element) grows by one. A channel
  // whose running statistics would not be finite in their dtype keeps them as they were, or, where
  // they are a cumulative average, gets NaN. If the whole group is empty nothing is updated. One
  // value per channel is, with fingerprint_sum, an error on the CPU.
  // A count of NaN says that a rank has aborted the pass, and fingerprints that do not add up to
  // fingerprint_sum, where one is given, say that ranks run different passes: on the CPU an error,
  // on CUDA (which never waits for the device) outputs of NaN, no update, and a note in `status`.
  //   status  [1]: float64 in pinned memory of the host, or on the device. If it is 0,
  //   fingerprint_sum is
  //            written to it where ranks run different passes, and -fingerprint_sum where one
  //            aborted.
  m.def(
      "batch_norm_apply(Tensor input, Tensor totals, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "float? momentum, float eps, float? fingerprint_sum=None, Tensor(d!)? status=None, "
      "Tensor? residual=None, int activation=0, float negative_slope=0, "
      "Tensor(e!)? constants=None, Tensor? mask=None) "
      "-> (Tensor output, Tensor mean, Tensor invstd, Tensor count)");

  // This rank's part of the sums over the batch that backward needs.
  //   grad_output  shape, dtype and layout of input.
  //   sums         [2C]: sum of dz per channel, sum of dz * xhat per channel, with
  //                xhat = (x - mean) * invstd; [2C+4] with a fingerprint. Ranks add them up.
  //                dz is dy or, with an activation, dy times its derivative at the z of forward.
  //   constants    with an activation: those of batch_norm_apply, for z to be computed again.
  //   grad_weight, grad_bias [C]: the same sums of this rank alone, in weight_dtype and bias_dtype,
  //                each a floating dtype.
  m.def(
      "batch_norm_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
      "ScalarType weight_dtype, ScalarType bias_dtype, float? fingerprint=None, float next_size=0, "
      "Tensor? constants=None, int activation=0, float negative_slope=0, Tensor? mask=None) "
      "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)");

  // The same where a residual has been added before an activation, whose gradient is dz; and, on
  // CPUs, of SiLU without one, where storing dz takes less time than computing it again.
  //   residual, constants
  //                with SiLU, those of batch_norm_apply, for z to be computed again.
  //   output       with ReLU and leaky ReLU, that of batch_norm_apply, which has the sign of z.
  //   dz           input's shape, dtype and layout, rounded. The sums are of unrounded dz.
  m.def(
      "batch_norm_backward_reduce_dz(Tensor grad_output, Tensor input, Tensor mean, "
      "Tensor invstd, ScalarType weight_dtype, ScalarType bias_dtype, float? fingerprint, "
      "float next_size, "
      "Tensor? constants, int activation, float negative_slope, Tensor? residual, Tensor? output, "
      "Tensor? mask=None) "
      "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias, Tensor dz)");

  // The gradient of the input.
  //   sums         those of batch_norm_backward_reduce, summed over all ranks.
  //   count        [1]: number of values per channel in the whole group.
  //   weight, constants
  //                those of batch_norm_apply; constants only with an activation.
  //   grad_input   input's shape, dtype and layout:
  //                (dz - sum(dz) / count - xhat * sum(dz * xhat) / count) * weight * invstd,
  //                with dz as above. Where it has been stored, it is given for grad_output
  //                and no activation.
  // With fingerprint_sum, sums are of length 2C+4 and judged as totals are in batch_norm_apply.
  m.def(
      "batch_norm_backward_apply(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
      "Tensor? weight, Tensor sums, Tensor count, float? fingerprint_sum=None, Tensor(a!)? "
      "status=None, "
      "Tensor? constants=None, int activation=0, float negative_slope=0, Tensor? mask=None) "
      "-> Tensor grad_input");

  // batch_norm_stats and batch_norm_apply of a process that is alone: totals are its own message.
  m.def(
      "batch_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, "
      "Tensor? residual=None, int activation=0, float negative_slope=0, "
      "Tensor(d!)? constants=None, Tensor? mask=None) "
      "-> (Tensor output, Tensor mean, Tensor invstd, Tensor count)");

  // batch_norm_backward_reduce and batch_norm_backward_apply of a process that is alone.
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
      "Tensor? weight, Tensor count, ScalarType weight_dtype, ScalarType bias_dtype, "
      "Tensor? constants=None, int activation=0, float negative_slope=0, Tensor? mask=None) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}
