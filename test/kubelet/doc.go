// Package kubelet runs real kubelets on crius: stand-alone ones, whose pods are
// files in a directory, and which are queried over their own API as by an API
// server.
//
//	make kubelet
//
// builds the kubelets from the module proxy, once, and runs the tests. They are
// not part of `make test`, because building a kubelet takes longer than all of
// it: a quarter of an hour for each of the two versions on two cores.
//
// Features that need an API server cannot be tested here: static pods are
// neither evicted nor resized, and have no volumes except those of the node.
package kubelet
