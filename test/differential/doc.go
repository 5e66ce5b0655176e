// Package differential compares how crius and another tool, skopeo with the
// containers/storage of Debian, unpack the same layers: some hundred images of
// several makers, with everything that archives can hold. `make differential`
// runs it; test/runner does not, since the package needs the build tag.
package differential
