// Package kubelet runs real kubelets on crius: stand-alone ones, whose pods are
// files in a directory, and which are asked over their own API as an API server
// asks them.
//
//	make kubelet
//
// builds the kubelets from the module proxy, once, and runs the tests. They are no
// part of `make test`, because building a kubelet takes longer than all of it: a
// quarter of an hour for each of the two versions on two cores.
//
// What needs an API server cannot be seen here: static pods are neither evicted nor
// resized, and have no volumes but those of the node.
package kubelet
