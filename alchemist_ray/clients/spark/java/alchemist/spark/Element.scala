package alchemist.spark

import org.apache.spark.sql.catalyst.expressions.SpecializedGetters
import org.apache.spark.sql.types._
import org.apache.spark.unsafe.Platform

/** A dtype of Spark's columns (matrices have none of int8 and int16): how a value is stored as one
  * without loss. An element overrides one of the two `store`.
  */
private[spark] sealed abstract class Element(val nbytes: Int, val sparkType: DataType)
    extends Serializable {

  val name: String = toString.toLowerCase

  def store(block: Array[Byte], at: Int, value: Long, column: String): Unit =
    store(block, at, value.toDouble, column)

  def store(block: Array[Byte], at: Int, value: Double, column: String): Unit = {
    val whole = value.toLong
    if (whole != value || value == Element.BEYOND_LONG) throw outOfRange(value.toString, column)
    store(block, at, whole, column)
  }

  /** Store a field of a row, or an element of an array, that is a `from` there. */
  final def store(
      block: Array[Byte], at: Int, row: SpecializedGetters, field: Int, from: Element,
      column: String): Unit = from match {
    case Element.Float64 => store(block, at, row.getDouble(field), column)
    case Element.Int64 => store(block, at, row.getLong(field), column)
    case Element.Int32 => store(block, at, row.getInt(field).toLong, column)
    case Element.Float32 => store(block, at, row.getFloat(field).toDouble, column)
    case Element.Int16 => store(block, at, row.getShort(field).toLong, column)
    case Element.Int8 => store(block, at, row.getByte(field).toLong, column)
    case Element.Bool => store(block, at, if (row.getBoolean(field)) 1L else 0L, column)
  }

  def load(block: Array[Byte], from: Long): Double

  /** Copy doubles to elements. */
  def store(block: Array[Byte], at: Int, values: Array[Double], column: String): Unit = {
    var k = 0
    while (k < values.length) {
      store(block, at + k * nbytes, values(k), column)
      k += 1
    }
  }

  /** Copy elements to doubles. */
  def load(block: Array[Byte], at: Int, into: Array[Double]): Unit = {
    var k = 0
    while (k < into.length) {
      into(k) = load(block, Block.BASE + at + k * nbytes)
      k += 1
    }
  }

  protected def outOfRange(value: String, column: String): Failure =
    Failure("DtypeError", s"column '$column' has the value $value, which $name cannot represent: " +
      "send it with another dtype, or convert it first")
}

private[spark] object Element {
  private val BEYOND_LONG = math.pow(2, 63)

  def of(dtype: String): Element =
    Seq(Bool, Int8, Int16, Int32, Int64, Float32, Float64).find(_.name == dtype).get

  case object Bool extends Element(1, BooleanType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit =
      Platform.putByte(block, Block.BASE + at, if (value != 0) 1 else 0)
    def load(block: Array[Byte], from: Long): Double = Platform.getByte(block, from)
  }

  case object Int8 extends Element(1, ByteType) {
    def load(block: Array[Byte], from: Long): Double = Platform.getByte(block, from)
  }

  case object Int16 extends Element(2, ShortType) {
    def load(block: Array[Byte], from: Long): Double = Platform.getShort(block, from)
  }

  case object Int32 extends Element(4, IntegerType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit = {
      if (value != value.toInt) throw outOfRange(value.toString, column)
      Platform.putInt(block, Block.BASE + at, value.toInt)
    }
    def load(block: Array[Byte], from: Long): Double = Platform.getInt(block, from)
  }

  case object Int64 extends Element(8, LongType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit =
      Platform.putLong(block, Block.BASE + at, value)
    def load(block: Array[Byte], from: Long): Double = Platform.getLong(block, from).toDouble
  }

  case object Float32 extends Element(4, FloatType) {
    override def store(block: Array[Byte], at: Int, value: Double, column: String): Unit = {
      val rounded = value.toFloat
      if (rounded.isInfinite && !value.isInfinite) throw outOfRange(value.toString, column)
      Platform.putFloat(block, Block.BASE + at, rounded)
    }
    def load(block: Array[Byte], from: Long): Double = Platform.getFloat(block, from)
  }

  case object Float64 extends Element(8, DoubleType) {
    override def store(block: Array[Byte], at: Int, value: Double, column: String): Unit =
      Platform.putDouble(block, Block.BASE + at, value)
    override def store(
        block: Array[Byte], at: Int, values: Array[Double], column: String): Unit =
      Platform.copyMemory(
        values, Platform.DOUBLE_ARRAY_OFFSET, block, Block.BASE + at, 8L * values.length)
    def load(block: Array[Byte], from: Long): Double = Platform.getDouble(block, from)
    override def load(block: Array[Byte], at: Int, into: Array[Double]): Unit =
      Platform.copyMemory(
        block, Block.BASE + at, into, Platform.DOUBLE_ARRAY_OFFSET, 8L * into.length)
  }
}
