// What Python sees of the device. Importing this module registers the device with PyTorch.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "accounting.h"
#include "autocast.h"
#include "device.h"
#include "kernel.h"
#include "lines.h"
#include "operators.h"
#include "recording.h"
#include "set_data.h"

namespace py = pybind11;

namespace {

// Lets the device's thread of autograd finish before the interpreter ends. After a backward it may still have to let
// go of tensors that Python knows, for which it takes the GIL; in an interpreter that is ending that aborts the
// process. A backward over tensors that Python does not know comes after all of it, and leaves nothing behind.
const auto loaded_by = getpid();

void drain_autograd() {
  if (getpid() == loaded_by) {  // a forked process has no such thread
    const at::AutoGradMode with_gradients(true);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(true);  // in that thread, not in this one
    at::ones({}, at::TensorOptions().device(gaudi_sim::kDevice)).requires_grad_().mul(2).backward();
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace gaudi_sim;
  using namespace py::literals;
  using Released = py::call_guard<py::gil_scoped_release>;

  torch::utils::set_requires_device_init(c10::DeviceType::HPU, false);
  register_operators();
  register_autocast();

  m.def("end_graph", &end_graph, Released(), py::arg("tag"));
  m.def("reset", &reset_accounts, Released());
  m.def("counts", [] {
    const auto now = counts();
    return py::dict(
        "compilations"_a = now.compilations, "hits"_a = now.hits, "breaks"_a = now.breaks,
        "operators"_a = now.operators, "graphs"_a = now.graphs, "mixed"_a = now.mixed,
        "single"_a = now.single);
  });
  m.def("events", [] {
    py::list result;
    for (const auto& event : events()) {
      result.append(py::dict(
          "kind"_a = event.kind, "tag"_a = event.tag, "line"_a = event.line, "operators"_a = event.operators,
          "difference"_a = event.difference, "time"_a = event.time, "in_step"_a = event.in_step));
    }
    return result;
  });

  m.def("set_eager", &set_eager);
  m.def(
      "compiled", &compiled, Released(), py::arg("tag"), py::arg("line"), py::arg("operators"), py::arg("difference"));
  m.def("enter_compiled", &enter_compiled, Released());
  m.def("leave_compiled", &leave_compiled);

  m.def("enter_step", &enter_step, py::arg("strict"));
  m.def("leave_step", &leave_step);

  m.def("capture_begin", &capture_begin, Released());
  m.def("capture_end", &capture_end, Released());
  m.def("replay", &replay, Released(), py::arg("handle"));
  m.def("free", &free_recording, Released(), py::arg("handle"));

  m.def("to_cpu", [](const at::Tensor& tensor) { return on_device(tensor) ? host_tensor(tensor) : tensor; });
  m.def("from_cpu", [](const at::Tensor& tensor) { return on_device(tensor) ? tensor : device_tensor(tensor); });
  m.def("refuse_set_data", &refuse_set_data);
  m.def("refuse_operators", &refuse_operators, py::arg("error"));
  m.def("default_generator", [] { return default_generator(); });

  m.def("drain_autograd", &drain_autograd, Released());

  m.def("memory", [] {
    const auto now = memory();
    return py::dict("in_use"_a = now.in_use, "peak"_a = now.peak, "total"_a = now.total);
  });
  m.def("reset_peak", &reset_peak);
  m.def("set_library_paths", &set_library_paths, py::arg("framework"), py::arg("packages"));
}
