// The one kernel that all operators of the device have.
#pragma once

#include <ATen/core/boxing/OperatorKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "call.h"

namespace gaudi_sim {

// What is known about an operator before it is called.
struct Kernel final : c10::OperatorKernel {
  Kernel(const c10::OperatorHandle& op, const c10::OperatorHandle& host, void (*arrange)(Stack&));

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) const;

  // Runs the CPU's kernel on arguments of the host.
  void run_on_host(Stack& stack) const;

  c10::OperatorHandle op;
  c10::OperatorHandle host;  // what runs on the CPU, where it is another one
  void (*arrange)(Stack&);   // turns the arguments into those of `host`
  std::string name;
  uint64_t hash;
  size_t arguments;
  size_t results;
  size_t generator;              // which argument, if any
  std::vector<bool> is_operand;  // arguments whose value is not part of a graph's key
  bool mutates;
  bool packs;               // its results are contiguous, whatever the operands' strides
  bool computes;            // not only a view, a change of shape or a read
  bool copies;              // between tensors, perhaps of two devices
  bool reads;               // a number, or a shape that depends on values
  bool indexes;             // reads where an index is a mask
  bool repeats;             // reads where the size of the result is not given
  bool draws_from_default;  // random numbers, and takes no generator
  bool lacks_int64;         // falls back to the host for such tensors
  bool warns;               // inside a recording
};

// From now on every operator that computes fails with this error, as on a card whose software does not fit its driver.
void refuse_operators(const std::string& error);

}  // namespace gaudi_sim
