// Facts of many tensors of torch's at a time, by its exchange functions for DLPack
// (Tensor.__dlpack_c_exchange_api__): one call takes 55 ns for what four attributes read in Python
// take 250 ns.
#include <algorithm>
#include <cstring>

#include "bindings/bindings.h"

namespace vlmk {
namespace {

// DLTensor and DLPackExchangeAPI of dlpack.h, version 1.2 (https://github.com/dmlc/dlpack); only
// what a later minor version may add is behind them.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DlExchange {
  uint32_t major, minor;
  const void *previous, *allocate, *export_managed, *import_managed;
  int (*read)(void* object, DlTensor* tensor);  // 0, or -1 and a Python error
};

bool is_known(const py::capsule& capsule) {
  const auto* exchange = capsule.get_pointer<const DlExchange>();
  return exchange->major == 1 && exchange->minor >= 2 && exchange->read != nullptr;
}

const DlExchange& exchange_of(const py::capsule& capsule) {
  if (!is_known(capsule)) throw std::invalid_argument("exchange is not of DLPack 1.2 or a later 1");
  return *capsule.get_pointer<const DlExchange>();
}

// False for a tensor without memory of its own, such as a sparse one.
bool read(const DlExchange& exchange, py::handle object, DlTensor& tensor) {
  if (exchange.read(object.ptr(), &tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

py::handle at(const py::list& objects, size_t i) {
  return PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i));
}

// Fetches what read() of later objects will wait for: an object, then what the two words behind its
// head point to, of torch's tensors the TensorImpl. Wrong addresses do no harm.
void fetch_later(const py::list& objects, size_t i) {
  constexpr size_t kObject = 16, kImpl = 8;
  if (i + kObject < objects.size()) __builtin_prefetch(at(objects, i + kObject).ptr());
  if (i + kImpl >= objects.size()) return;
  PyObject* const object = at(objects, i + kImpl).ptr();
  const char* words[2];
  if (Py_TYPE(object)->tp_basicsize < static_cast<Py_ssize_t>(sizeof(*object) + sizeof(words))) {
    return;
  }
  std::memcpy(words, object + 1, sizeof(words));
  for (const char* const to : words) {
    if (reinterpret_cast<uintptr_t>(to) < 4096) continue;  // no address: a look-up for nothing
    for (int line = 0; line < 4; ++line) __builtin_prefetch(to + 64 * line);
  }
}

// Address, device, type, shape and strides of each tensor, to be compared with those of another
// time.
py::bytes forms(const py::capsule& capsule, const py::list& tensors) {
  const DlExchange& exchange = exchange_of(capsule);
  std::string forms;
  const auto append = [&](const int64_t* numbers, int64_t count) {
    forms.append(reinterpret_cast<const char*>(numbers), static_cast<size_t>(count) * 8);
  };
  forms.reserve(64 * tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    fetch_later(tensors, i);
    DlTensor x{};
    if (!read(exchange, at(tensors, i), x)) x = DlTensor{};
    const auto address = reinterpret_cast<int64_t>(x.data) + static_cast<int64_t>(x.byte_offset);
    const int64_t type = x.code | x.bits << 8 | x.lanes << 16;
    const int64_t numbers[] = {address, x.device_type, x.device_id, type, x.ndim};
    append(numbers, 5);
    append(x.shape, x.ndim);
    append(x.strides, x.ndim);
  }
  return forms;
}

// Whether each gradient is of one of the classes, of the shape and device of its parameter, float32
// or bfloat16, strided, and in memory.
bool are_gradients(const py::capsule& capsule, const py::tuple& classes, const py::list& params,
                   const py::list& grads) {
  constexpr uint8_t kFloat = 2, kBfloat = 4;  // DLDataTypeCode
  const DlExchange& exchange = exchange_of(capsule);
  if (params.size() != grads.size()) return false;
  for (size_t i = 0; i < grads.size(); ++i) {
    fetch_later(grads, i);
    fetch_later(params, i);
    const py::handle object = at(grads, i);
    const bool plain = std::any_of(classes.begin(), classes.end(), [&](py::handle kind) {
      return kind.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    });
    DlTensor grad{}, param{};
    const bool known =
        plain && read(exchange, object, grad) && read(exchange, at(params, i), param);
    const bool allocated =
        grad.data != nullptr || std::count(grad.shape, grad.shape + grad.ndim, 0);
    const bool floats = (grad.code == kFloat && grad.bits == 32) ||  //
                        (grad.code == kBfloat && grad.bits == 16);
    if (!known || !floats || !allocated || grad.lanes != 1 ||
        grad.device_type != param.device_type || grad.device_id != param.device_id ||
        grad.ndim != param.ndim || !std::equal(grad.shape, grad.shape + grad.ndim, param.shape)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void register_tensors(py::module_& m) {
  m.def("reads_tensors", &is_known, "exchange"_a);
  m.def("tensor_forms", &forms, "exchange"_a, "tensors"_a);
  m.def("are_gradients", &are_gradients, "exchange"_a, "classes"_a, "params"_a, "grads"_a);
}

}  // namespace vlmk
