// Schemas and contracts of the operators. csrc/cpu and csrc/cuda implement and register them, one
// file for each operator.
//
// Common to all operators:
//   input        (N, C, ...) with at least 2 dimensions and C > 0; float16, bfloat16, float32 or
//                float64; contiguous or channels-last. N and each spatial size may be 0.
//   weight, bias, running_mean, running_var
//                channel vectors: shape [C], any stride, in the input's dtype, float32 or float64.
//   mask         bool, (N, ...) or (N, 1, ...) as input, contiguous; only on CPUs. Values at
//                a position where the mask is false are masked: they do not enter any sum, even if
//                they are NaN, and outputs, dz and gradients are 0 there. None masks nothing.
//   message, totals, sums, mean, invstd, count, constants
//                contiguous float64.
//   tail         contiguous float64 [3], on the CPU: see syncbn/distributed/negotiation.py. A
//                message with a tail has 2C+4 values in both directions: 2C sums, the count (0 in
//                backward passes) and the tail.
//   tail_sum     the expected sum of the first values of all ranks' tails. If it is given, sums are
//                verified: a count of NaN means that a rank aborted the pass, another sum of tails
//                that ranks run different passes. On CPUs both are errors, and so is a count of 1,
//                one value per channel in the whole group. On CUDA outputs are NaN, running
//                statistics keep their values, and `status` gets a note.
//   status       [1], float64, in pinned memory of the host or on the device. A note replaces 0: it
//                is tail_sum if ranks run different passes, -tail_sum if one aborted.
//   activation   0: none, 1: ReLU, 2: leaky ReLU with negative_slope, 3: SiLU.
// All tensors are on one device. No operator waits for a CUDA device. Results do not depend on the
// number of threads. No operator communicates or has an autograd formula: the Python layer joins
// operators and collectives. Errors are RuntimeError; "TypeError: " or "ValueError: " in front of a
// message names the exception that the Python layer raises in its place.

#include "common/operators.h"

STABLE_TORCH_LIBRARY(syncbn, m) {
  // Raises the errors of a layer's arguments, for tensors of any device and strides: evaluation and
  // devices without operators call it. With `training`, running statistics must not be expanded and
  // a momentum of None needs num_batches_tracked.
  m.def(
      "check_arguments(Tensor input, Tensor? weight=None, Tensor? bias=None, "
      "Tensor? running_mean=None, Tensor? running_var=None, Tensor? num_batches_tracked=None, "
      "float? momentum=0.0, Tensor? residual=None, Tensor? mask=None, bool training=True) -> ()");

  // Computes this rank's part of the batch statistics as a message; ranks add up their messages.
  //   message  [2C+1], or [2C+4] with a tail: sum of x per channel, sum of x^2 per channel, number
  //            of values per channel.
  // Sums are derived from the mean and the sum of squared deviations, so that the message is as
  // accurate as float64 permits. The message of an empty input is zeros.
  // The arguments from weight to residual are only checked, as check_arguments does: a rank that
  // gets a wrong one fails before it meets the others.
  m.def(
      "batch_norm_stats(Tensor input, Tensor? tail=None, Tensor? weight=None, Tensor? bias=None, "
      "Tensor? running_mean=None, Tensor? running_var=None, Tensor? num_batches_tracked=None, "
      "float? momentum=0.0, Tensor? residual=None, Tensor? mask=None) -> Tensor message");

  // Normalizes with the statistics of the whole group and updates the running statistics.
  //   totals   the sum of all ranks' messages.
  //   residual shape, dtype and layout of input; None is 0.
  //   output   shape, dtype and layout of input: activation(z), with
  //            z = (x - mean) * invstd * weight + bias + residual and
  //            invstd = 1 / sqrt(biased variance + eps); a weight of None is 1, a bias of None 0.
  //            The activation takes the unrounded z; a positive z that output's dtype rounds to 0
  //            counts as 0.
  //   mean, invstd, count
  //            [C], [C] and [1]: for the backward pass.
  //   constants
  //            [2C], overwritten if given: scale and shift of each channel, for the backward pass;
  //            z = (x - center) * scale + shift + residual, and center is the mean rounded to the
  //            type of the computation.
  // running_mean and running_var (both or neither) move by `momentum` toward the mean and the
  // unbiased variance. num_batches_tracked (int64, one element) grows by one. A momentum of None is
  // the cumulative average, a factor of 1 / num_batches_tracked, and requires num_batches_tracked.
  // A channel whose running statistics would not be finite in their dtype keeps its old ones; in a
  // cumulative average they become NaN. If the whole group is empty, nothing is updated.
  m.def(
      "batch_norm_apply(Tensor input, Tensor totals, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "float? momentum, float eps, float? tail_sum=None, Tensor(d!)? status=None, "
      "Tensor? residual=None, int activation=0, float negative_slope=0, "
      "Tensor(e!)? constants=None, Tensor? mask=None) "
      "-> (Tensor output, Tensor mean, Tensor invstd, Tensor count)");

  // Computes this rank's part of the sums for the backward pass.
  //   grad_output  shape, dtype and layout of input.
  //   sums         [2C], or [2C+4] with a tail: sum of dz per channel, sum of dz * xhat per
  //                channel, with xhat = (x - mean) * invstd. Ranks add them up. dz is grad_output
  //                or, with an activation, grad_output times the activation's derivative at z.
  //   constants    output of batch_norm_apply; given with an activation, and only then.
  //   grad_weight, grad_bias
  //                [C]: the same sums of this rank, in weight_dtype and bias_dtype, two floating
  //                dtypes.
  m.def(
      "batch_norm_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
      "ScalarType weight_dtype=double, ScalarType bias_dtype=double, Tensor? tail=None, "
      "Tensor? constants=None, int activation=0, float negative_slope=0, Tensor? mask=None) "
      "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)");

  // The same operator, which also stores dz: if a residual was added before an activation, dz is
  // the residual's gradient. On CPUs it also serves SiLU without a residual: storing dz takes less
  // time than computing it again.
  //   output       given with ReLU and leaky ReLU: batch_norm_apply's, which has the sign of z.
  //   residual, constants
  //                given with other activations: the same tensors as in batch_norm_apply.
  //   dz           shape, dtype and layout of input. The sums are of the unrounded dz.
  m.def(
      "batch_norm_backward_reduce_dz(Tensor grad_output, Tensor input, Tensor mean, "
      "Tensor invstd, ScalarType weight_dtype, ScalarType bias_dtype, Tensor? tail, "
      "Tensor? constants, int activation, float negative_slope, "
      "Tensor? residual, Tensor? output, Tensor? mask=None) "
      "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias, Tensor dz)");

  // Computes the gradient of the input.
  //   sums         the sum of all ranks' sums; with tail_sum, 2C+4 values.
  //   count        [1]: number of values per channel in the whole group.
  //   weight, constants
  //                the same as in batch_norm_apply; constants with an activation, and only then.
  //   grad_input   shape, dtype and layout of input:
  //                (dz - sum(dz) / count - xhat * sum(dz * xhat) / count) * weight * invstd.
  // If dz was stored, it is passed as grad_output, without an activation.
  m.def(
      "batch_norm_backward_apply(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
      "Tensor? weight, Tensor sums, Tensor count, float? tail_sum=None, "
      "Tensor(a!)? status=None, Tensor? constants=None, int activation=0, float negative_slope=0, "
      "Tensor? mask=None) "
      "-> Tensor grad_input");

  // Returns sums without their tail, verified.
  //   sums      [n+3]: n-1 values, the count, and the sum of tails.
  //   other_tail_sum
  //             a second value that the sum of tails may have.
  //   verified  [n]; on CUDA, NaN if the sums are inconsistent.
  m.def(
      "verify_sums(Tensor sums, float tail_sum, float? other_tail_sum=None, "
      "Tensor(a!)? status=None) -> Tensor verified");

  // batch_norm_stats and batch_norm_apply of a single process, whose totals are its own message.
  m.def(
      "batch_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, "
      "Tensor? residual=None, int activation=0, float negative_slope=0, "
      "Tensor(d!)? constants=None, Tensor? mask=None) "
      "-> (Tensor output, Tensor mean, Tensor invstd, Tensor count)");

  // batch_norm_backward_reduce and batch_norm_backward_apply of a single process.
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
      "Tensor? weight, Tensor count, ScalarType weight_dtype, ScalarType bias_dtype, "
      "Tensor? constants=None, int activation=0, float negative_slope=0, Tensor? mask=None) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

namespace {

std::tuple<> check(const syncbn::ForwardArguments& a) {
  syncbn::check_arguments(a);
  return {};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  m.impl("check_arguments", &syncbn::boxed<syncbn::read_check, check>);
}
